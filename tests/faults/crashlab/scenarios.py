"""What jobs do in the life of a run directory; each scenario is recorded and then crashed.

The disk that a scenario begins with is durable and was made by the real store; only what the
scenario itself does is explored. A ``Lab`` says how the job is built, so that a mutant of the
protocol goes through the same scenarios.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace

from crashlab.background_saves import (
    Trouble,
    leave_parts,
    save_in_background,
    stage_with_parts,
)
from crashlab.disk import Disk
from crashlab.frozen_tensors import FrozenTensors
from crashlab.interruptions import RefusesLinks
from crashlab.jobs import Job, Wrap
from crashlab.large_files import LargeFile
from crashlab.recording import RUN, Recording
from resumekit.errors import SaveError
from resumekit.run.saving.payloads import FrozenLinks
from resumekit.serialization.writing import FrozenFiles
from resumekit.storage.directories import StepName
from resumekit.storage.parts import Parts
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store


@dataclass(frozen=True)
class Lab:
    """How jobs are built; see ``Job``."""

    world_size: int = 1
    wrap: Wrap = lambda inner: inner
    store_class: type[Store] = Store
    parts_class: type[Parts] = Parts
    barriers: bool = True
    is_in_place: bool = False
    links_class: type[FrozenLinks] = FrozenLinks
    files_class: type[FrozenFiles] = FrozenFiles

    def frozen(self, policy: RetentionPolicy, changed_at: Collection[int] = ()) -> FrozenTensors:
        """The frozen tensors of a job."""
        return FrozenTensors(
            policy, self.world_size, changed_at, self.links_class, self.files_class
        )

    def job(
        self, disk: Disk, policy: RetentionPolicy | None = None, *, after: Job | None = None
    ) -> Job:
        """A launch on this disk, which ``after`` has left behind."""
        job = Job(
            Recording.on(disk),
            self.world_size,
            policy or RetentionPolicy(keep_latest=None),
            wrap=self.wrap,
            store_class=self.store_class,
            parts_class=self.parts_class,
            barriers=self.barriers,
            is_in_place=self.is_in_place,
        )
        if after is not None:
            job.continues(after)
        return job


Scenario = Callable[[Lab], Job]
KEEP_ONE, KEEP_ALL = RetentionPolicy(keep_latest=1), RetentionPolicy(keep_latest=None)


def empty_disk() -> Disk:
    """A machine on which nothing of the run directory exists, not even its parent."""
    disk = Disk()
    disk.make_directories(RUN.parent.parent)
    return disk


def earlier_launch(lab: Lab, *steps: int, metrics: dict[int, float] | None = None) -> Job:
    """A launch of the unchanged protocol that saved these steps and ended."""
    job = replace(Lab(), world_size=lab.world_size).job(empty_disk())
    job.start()
    for step in steps:
        job.save(step, metric=(metrics or {}).get(step))
    return job


def _relaunched(
    lab: Lab,
    *steps: int,
    policy: RetentionPolicy = KEEP_ONE,
    metrics: dict[int, float] | None = None,
    before: Callable[[Job], object] = lambda earlier: None,
) -> Job:
    """A started launch after one that saved these steps, and did something before it ended."""
    earlier = earlier_launch(lab, *steps, metrics=metrics)
    before(earlier)
    return _launched_after(lab, earlier, policy)


def _launched_after(lab: Lab, earlier: Job, policy: RetentionPolicy = KEEP_ONE) -> Job:
    job = lab.job(earlier.recording.disk, policy, after=earlier)
    job.start()
    return job


def first_save(lab: Lab) -> Job:
    job = lab.job(empty_disk())
    job.start()
    job.save(1)
    return job


def next_save(lab: Lab) -> Job:
    job = _relaunched(lab, 1, policy=KEEP_ALL)
    job.save(2)
    return job


def keep_only_the_latest(lab: Lab) -> Job:
    job = _relaunched(lab, 1)
    job.save(2)
    job.save(3)
    return job


def keep_two_and_every_fourth(lab: Lab) -> Job:
    job = _relaunched(lab, 3, 4, policy=RetentionPolicy(keep_latest=2, keep_every=4))
    job.save(5)
    job.save(6)
    return job


def keep_the_best(lab: Lab) -> Job:
    policy = RetentionPolicy(keep_latest=1, keep_best=1)
    job = _relaunched(lab, 1, 2, policy=policy, metrics={1: 0.25, 2: 0.75})
    job.save(3, metric=0.5)
    job.save(4, metric=0.125)
    return job


def same_step_twice(lab: Lab) -> Job:
    job = _relaunched(lab, 1, 2, policy=RetentionPolicy(keep_latest=2))
    job.save(2)
    job.save(2)
    return job


def abandoned_save(lab: Lab) -> Job:
    job = _relaunched(lab, 1)
    name, stagings = job.stage(2)
    job.write(name, stagings)
    job.stores[0].abandon(stagings[0])
    job.recording.barrier()
    job.save(3)
    return job


def relaunch_over_stale_staging(lab: Lab) -> Job:
    # The earlier launch is killed when it has written its files.
    job = _relaunched(lab, 1, before=lambda earlier: earlier.write(*earlier.stage(2)))
    job.save(2)
    return job


def two_launches(lab: Lab) -> Job:
    job = _relaunched(lab, 1, policy=KEEP_ALL)
    job.save(2)
    job.stores[0].release()
    again = _launched_after(lab, job, KEEP_ALL)
    again.save(3)
    return again


def first_background_save(lab: Lab) -> Job:
    job = lab.job(empty_disk())
    job.start()
    save_in_background(job, 1)
    return job


def background_saves_and_retention(lab: Lab) -> Job:
    job = _relaunched(lab, 1)
    save_in_background(job, 2)
    job.save(3)
    save_in_background(job, 3)
    return job


def trash_left_to_the_next_save_and_the_next_launch(lab: Lab) -> Job:
    job = _relaunched(lab, 1)
    save_in_background(job, 2, empties=False)
    save_in_background(job, 3, empties=False)
    again = _launched_after(lab, job)
    save_in_background(again, 4)
    return again


def rank_lost_before_its_part(lab: Lab) -> Job:
    return _saved_after(lab, Trouble(lost=[lab.world_size - 1]))


def rank_that_reports_a_failure(lab: Lab) -> Job:
    return _saved_after(lab, Trouble(failing=[lab.world_size - 1]))


def _saved_after(lab: Lab, trouble: Trouble) -> Job:
    job = _relaunched(lab, 1)
    with suppress(SaveError):
        save_in_background(job, 2, trouble)
    save_in_background(job, 3)
    return job


def stale_parts_in_place(lab: Lab) -> Job:
    job = _relaunched(lab, 1)
    changes = {"run_id": "0" * 32}, {"attempt": "0" * 32}, {"step": 1}, {"save_number": 0}
    save_in_background(job, 2, Trouble(stale=changes))
    return job


def relaunch_over_parts_of_a_killed_job(lab: Lab) -> Job:
    def leave_all(earlier: Job) -> None:
        name, stagings, parts = stage_with_parts(earlier, 2)
        leave_parts(earlier, name, stagings, parts, Trouble())  # and then it is killed

    job = _relaunched(lab, 1, before=leave_all)
    save_in_background(job, 2)
    return job


def retention_of_a_pinned_checkpoint(lab: Lab) -> Job:
    job = _relaunched(lab, 1)
    job.pin(StepName(1))
    save_in_background(job, 2)
    job.unpin(StepName(1))
    save_in_background(job, 3)
    return job


def full_disk_at_the_start(lab: Lab) -> Job:
    policy = RetentionPolicy(keep_latest=None)
    job = _relaunched(lab, 1, 2, 3, 4, policy=policy, metrics={2: 0.25, 3: 0.5})
    job.load_newest()
    job.prune()
    job.save(5)
    job.prune()
    return job


def full_disk_in_a_save(lab: Lab) -> Job:
    job = _relaunched(lab, 1, 2, policy=KEEP_ALL)
    job.load_newest()
    name, stagings = job.stage(3)
    job.write(name, stagings)
    job.stores[0].abandon(stagings[0])
    job.recording.barrier()
    job.prune()
    job.save(3)
    return job


def damage_in_quarantine(lab: Lab) -> Job:
    job = _relaunched(lab, 1, 2, before=lambda earlier: _damage(earlier, StepName(2)))
    job.load_newest()
    job.save(2)
    return job


def nothing_but_damage(lab: Lab) -> Job:
    def damage(earlier: Job) -> None:
        _damage(earlier, StepName(1))
        _damage(earlier, StepName(2))

    job = _relaunched(lab, 1, 2, policy=KEEP_ALL, before=damage)
    job.load_newest()
    return job


def _damage(job: Job, name: StepName) -> None:
    number = job.recording.disk.find(RUN / str(name) / "model/rank-00000.safetensors")
    job.recording.disk.file(number).flip(4321)
    job.promises[-1] = job.promises[-1].after_damage(name)


def _with_frozen(lab: Lab, *, keep_latest: int | None = 2, changed_at: Collection[int] = ()) -> Job:
    """A launch with frozen tensors and two checkpoints: from the next one on, it links."""
    policy = RetentionPolicy(keep_latest=keep_latest)
    job = lab.job(empty_disk(), policy)
    job.frozen = lab.frozen(policy, changed_at)
    job.start()
    job.save(1)
    job.save(2)
    job.forget_calls()
    return job


def frozen_files_are_linked(lab: Lab) -> Job:
    job = _with_frozen(lab, keep_latest=None)
    job.save(3)
    save_in_background(job, 4)
    return job


def sources_of_links_are_removed(lab: Lab) -> Job:
    job = _with_frozen(lab)
    save_in_background(job, 3, empties=False)
    job.save(4)
    return job


def frozen_tensors_change(lab: Lab) -> Job:
    job = _with_frozen(lab, changed_at=[3])
    job.save(3)
    job.save(4)
    return job


def source_of_a_link_was_saved_twice(lab: Lab) -> Job:
    job = _with_frozen(lab)
    job.save(2)
    job.save(3)
    return job


def save_with_links_is_abandoned(lab: Lab) -> Job:
    job = _with_frozen(lab)
    with suppress(SaveError):
        save_in_background(job, 3, Trouble(failing=[lab.world_size - 1]))
    job.save(3)
    return job


def links_are_refused(lab: Lab) -> Job:
    causes = itertools.cycle((errno.EXDEV, errno.EPERM, errno.EMLINK, None))
    refusing = replace(lab, wrap=lambda inner: lab.wrap(RefusesLinks(inner, causes)))
    job = _with_frozen(refusing)
    for step in (3, 4, 5):
        job.save(step)
    return job


def large_save(lab: Lab, *, is_async: bool) -> Job:
    """A save above 64 MB after a small one; too slow for the tests of every scenario."""
    job = _relaunched(lab, 1)
    job.frozen = LargeFile(is_image=is_async)
    job.forget_calls()
    if is_async:
        save_in_background(job, 2)
    else:
        job.save(2)
    return job


WITH_LINKS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        frozen_files_are_linked,
        sources_of_links_are_removed,
        frozen_tensors_change,
        source_of_a_link_was_saved_twice,
        save_with_links_is_abandoned,
        links_are_refused,
    )
}

SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        first_save,
        next_save,
        keep_only_the_latest,
        keep_two_and_every_fourth,
        keep_the_best,
        same_step_twice,
        abandoned_save,
        relaunch_over_stale_staging,
        two_launches,
        first_background_save,
        background_saves_and_retention,
        trash_left_to_the_next_save_and_the_next_launch,
        rank_lost_before_its_part,
        rank_that_reports_a_failure,
        stale_parts_in_place,
        relaunch_over_parts_of_a_killed_job,
        retention_of_a_pinned_checkpoint,
        full_disk_at_the_start,
        full_disk_in_a_save,
        damage_in_quarantine,
        nothing_but_damage,
    )
} | WITH_LINKS
