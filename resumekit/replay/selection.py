"""Which checkpoint a replay begins from, and how far it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from resumekit.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from resumekit.record.journal import DIRECTORY, STEP, Attempt, find_attempts
from resumekit.storage import StepName, StepReader, Store


@dataclass(frozen=True)
class Selection:
    """What is replayed.

    Args:
        begin: the checkpoint.
        last_step: the last step.
        ends_run: whether the run ended there, so that the script ends by itself.
        checkpoints: those of the run up to the last step, the newest of each step.
        attempts: the journal of the run.
    """

    begin: StepReader
    last_step: int
    ends_run: bool
    checkpoints: tuple[StepReader, ...]
    attempts: tuple[Attempt, ...]

    @property
    def first_step(self) -> int:
        """The first step that is repeated."""
        return self.begin.name.step + 1


def select_steps(
    directory: Path, from_step: int, num_steps: int | None, *, to_journal_end: bool = False
) -> Selection:
    """The steps to replay.

    Args:
        directory: of the run.
        from_step: the newest checkpoint at or before this step is taken.
        num_steps: after ``from_step``; None: up to the next checkpoint, or the journal's end.
        to_journal_end: without ``num_steps``, pass by the checkpoints.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        ConfigurationError: there is nothing to compare with.
    """
    readers = _newest_of_each_step(directory)
    before = [each for each in readers if each.name.step <= from_step]
    if not before:
        oldest = f"--from {readers[0].name.step} or more" if readers else "a run with checkpoints"
        raise CheckpointNotFoundError(
            str(directory), found=f"no checkpoint at or before step {from_step}", expected=oldest
        )
    attempts = tuple(find_attempts(directory / DIRECTORY))
    after = [each for each in readers if each.name.step > from_step]
    if num_steps is not None:
        last_step = from_step + num_steps
    elif after and not to_journal_end:
        last_step = after[0].name.step
    else:
        last_step = max(_last_recorded(attempts), *(each.name.step for each in readers))
    if last_step <= before[-1].name.step:
        raise ConfigurationError(
            str(directory),
            found=f"neither the journal nor a checkpoint goes beyond step {last_step}",
            expected="--from an earlier step",
        )
    passed = tuple(each for each in after if each.name.step <= last_step)
    ends_run = any(each.manifest.finished and each.name.step == last_step for each in passed)
    return Selection(before[-1], last_step, ends_run, passed, attempts)


def _newest_of_each_step(directory: Path) -> list[StepReader]:
    """Oldest first; those that cannot be opened are left out."""
    store, found = Store(directory), dict[int, StepReader]()
    for name in sorted(store.step_names()):
        reader = _opened(store, name)
        if reader is not None:
            found[name.step] = reader
    return list(found.values())


def _opened(store: Store, name: StepName) -> StepReader | None:
    try:
        return store.open_step(name)
    except CheckpointError:
        return None


def _last_recorded(attempts: Sequence[Attempt]) -> int:
    steps = (each.step for attempt in attempts for each in attempt.records() if each.kind == STEP)
    return max(steps, default=0)
