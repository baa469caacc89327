"""Saves without collectives: every rank leaves a part, rank 0 commits what the parts list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from crashlab.jobs import Job, content_of
from resumekit.errors import SaveError
from resumekit.storage.commit import Staging
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileEntry
from resumekit.storage.parts import Part, Parts


@dataclass(frozen=True)
class Trouble:
    """What happens to one background save.

    Args:
        lost: ranks that end after their data, before their part.
        failing: ranks that cannot create one of their files, and report that.
        stale: parts of the last rank that are there already, as changes to the right one.
    """

    lost: Sequence[int] = ()
    failing: Sequence[int] = ()
    stale: Sequence[Mapping[str, object]] = ()


def save_in_background(
    job: Job, step: int, trouble: Trouble | None = None, *, empties: bool = True
) -> StepName:
    """One whole save as the background threads make it; its name.

    Args:
        job: a started launch.
        step: optimizer steps.
        trouble: that the save has.
        empties: whether the trash is emptied.

    Raises:
        SaveError: as rank 0 finds it; nothing was committed.
    """
    name, stagings, parts = stage_with_parts(job, step)
    leave_parts(job, name, stagings, parts, trouble or Trouble())
    try:
        parts.look()
        files = parts.files()
    except SaveError:
        job.stores[0].abandon(stagings[0])
        job.recording.barrier()
        raise
    job.commit(name, stagings[0], list(files), empties=empties)
    for rank in _late_ranks(job):
        with suppress(SaveError):
            _leave_part(job, name, stagings[rank], rank)
    return name


def stage_with_parts(job: Job, step: int) -> tuple[StepName, list[Staging], Parts]:
    """The staging directory as each rank sees it, and the parts in it as rank 0 finds them."""
    name, stagings = job.stage(step, with_parts=True)
    job.num_background_saves += 1
    store = job.stores[0]
    parts = stagings[0].parts(
        run_id=store.run_id,
        attempt=store.attempt,
        save_number=job.num_background_saves,
        world_size=job.world_size,
    )
    parts.__class__ = job.parts_class
    return name, stagings, parts


def leave_parts(
    job: Job, name: StepName, stagings: Sequence[Staging], parts: Parts, trouble: Trouble
) -> None:
    """Every rank writes its files and leaves its part; they do so at the same time."""
    last = len(stagings) - 1
    for changes in trouble.stale:
        part = replace(_wrong_part(job, name, last), **changes)  # type: ignore[arg-type]
        stagings[last].leave_part(part)
    parts.look()
    job.recording.barrier()
    for rank, staging in enumerate(stagings):
        if rank not in _late_ranks(job):
            _leave_part(job, name, staging, rank, trouble)
    if job.barriers:
        # Rank 0 continues only once it has seen the parts of the others.
        job.recording.barrier()


def _late_ranks(job: Job) -> range:
    """Without barriers, these ranks have done nothing yet when rank 0 commits."""
    return range(job.world_size if job.barriers else 1, job.world_size)


def _leave_part(
    job: Job, name: StepName, staging: Staging, rank: int, trouble: Trouble | None = None
) -> None:
    trouble = trouble or Trouble()
    content, part = content_of(name, rank), _part(job, name, rank)
    if rank in trouble.failing:
        content.popitem()
        part = replace(part, error="ENOSPC")
    try:
        part = replace(part, files=tuple(job.write_files(name, staging, rank, content)))
    except SaveError as error:
        part = replace(part, error=str(error))
    if rank not in trouble.lost:
        with suppress(SaveError):  # it stays missing
            staging.leave_part(part)


def _part(job: Job, name: StepName, rank: int) -> Part:
    store = job.stores[rank]
    return Part(store.run_id, store.attempt, name.step, job.num_background_saves, rank)


def _wrong_part(job: Job, name: StepName, rank: int) -> Part:
    """A part of this save, but for the digests."""
    files = [
        FileEntry(path, len(content), "0" * 32, rank)
        for path, content in content_of(name, rank).items()
    ]
    return replace(_part(job, name, rank), files=tuple(files))
