"""Launches that are killed, that fail, or that another one overlaps: at a call of any number."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from crashlab.background_saves import save_in_background
from crashlab.interruptions import (
    FailsASync,
    FailsFrom,
    Interrupted,
    Interruption,
    Killed,
    KilledAt,
)
from crashlab.jobs import Job, Wrap
from crashlab.operations import FailedSync
from crashlab.scenarios import Lab, earlier_launch, empty_disk
from resumekit.errors import DirectoryError, ResumekitError, SaveError
from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import FileSystem
from resumekit.storage.retention import RetentionPolicy


def _launch(lab: Lab, *, keep_latest: int = 1) -> Job:
    """A launch over a checkpoint of an earlier one."""
    earlier = earlier_launch(Lab(world_size=lab.world_size), 1)
    policy = RetentionPolicy(keep_latest=keep_latest)
    job = lab.job(earlier.recording.disk, policy, after=earlier)
    if keep_latest > 1:
        job.frozen = lab.frozen(policy)
    return job


def _train(job: Job, *, background_only: bool) -> None:
    """Starts and saves, also after a save that has failed.

    Args:
        job: not started.
        background_only: no synchronous save in between: what one leaves must not harm the other.
    """
    job.start()
    for step in (2, 3, 4) if job.frozen is None else (2, 3, 4, 5):
        with suppress(SaveError):
            if background_only or step % 2 == 0:
                save_in_background(job, step)
            else:
                job.save(step)


def killed_and_relaunched(
    num_calls: int, *, keep_latest: int = 1, is_full: bool = False, next_lab: Lab | None = None
) -> Job | None:
    """A launch that is killed after a number of calls, and the next one on the same machine.

    Nothing is durable in between but what was synced. None when the job ends before the kill.

    Args:
        num_calls: that the launch makes.
        keep_latest: how many checkpoints stay; with more than one, frozen files are linked.
        is_full: whether the next one deletes old checkpoints before its first save.
        next_lab: how the next one is built.
    """
    job = _launch(Lab(wrap=lambda inner: KilledAt(inner, num_calls)), keep_latest=keep_latest)
    try:
        _train(job, background_only=False)
    except Killed:
        pass
    else:
        return None
    job.recording.barrier()
    lab = next_lab or Lab()
    again = Job(job.recording, policy=job.policy, wrap=lab.wrap, store_class=lab.store_class)
    again.continues(job)
    again.promises = list(job.promises)
    again.start()
    loaded = again.load_newest()
    if is_full and loaded.name is not None:
        again.prune()
    again.save((loaded.name or StepName(0)).step + 1)
    return again


def relaunched_next_to_a_survivor(lab: Lab, *, at_call: int) -> Job | None:
    """Rank 1 of a dead job of two is still writing while the relaunched job of one rank saves.

    The survivor creates its next file just before the new job's call of this number. None when the
    new job makes fewer calls.
    """
    dead = replace(lab, world_size=2).job(empty_disk())
    dead.start()
    dead.save(1)
    _, stagings = dead.stage(2)

    def write_on() -> None:
        with suppress(ResumekitError):  # its directory may be gone; that is its own problem
            stagings[1].create("state/rank-00001.json", writer=1)

    clock = Interruption(at_call, write_on)
    job = Job(
        dead.recording,
        wrap=lambda inner: Interrupted(lab.wrap(inner), clock),
        store_class=lab.store_class,
    )
    job.continues(dead)
    job.start()
    job.save(2)
    return job if clock.has_happened else None


def trained_on_after_a_failed_sync(number: int, wrap: Wrap = lambda inner: inner) -> Job | None:
    """A launch in which one fsync fails, and which trains and saves on if it has started.

    None when it makes fewer.
    """
    job = _launch(Lab(wrap=lambda inner: wrap(FailsASync(inner, number))))
    with suppress(DirectoryError):
        _train(job, background_only=False)
    failed = any(isinstance(call, FailedSync) for call in job.recording.operations)
    return job if failed else None


def trained_on_after_failing_calls(
    number: int, cause: int, *, for_good: bool, world_size: int = 1, keep_latest: int = 1
) -> Job | None:
    """A launch whose disk fails during its background saves, once or until the launch ends.

    Args:
        number: of the first failing call of each rank, counted from the start of the launch.
        cause: the errno.
        for_good: whether all later calls of that rank fail too.
        world_size: how many ranks.
        keep_latest: how many checkpoints stay; with more than one, frozen files are linked.

    Returns:
        The launch; None when it makes fewer calls.
    """
    faults: list[FailsFrom] = []

    def failing(inner: FileSystem) -> FailsFrom:
        faults.append(FailsFrom(inner, number, cause, for_good=for_good))
        return faults[-1]

    lab = Lab(world_size=world_size, wrap=failing)
    job = _launch(lab, keep_latest=keep_latest)
    with suppress(DirectoryError):
        _train(job, background_only=True)
    return job if any(fault.has_failed for fault in faults) else None
