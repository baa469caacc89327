"""``replay``: repeats steps of a run by its own command, and compares them with the run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from resumekit.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigurationError,
    ReplayError,
)
from resumekit.record.journal import DIRECTORY, STEP, Attempt, find_attempts
from resumekit.replay.result import RankResult, ReplayResult, compare_rank, compare_saved
from resumekit.replay.running import isolated
from resumekit.replay_plan import ReplayPlan
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import StepReader
from resumekit.storage.store import Store


@dataclass(frozen=True)
class Selection:
    """What is replayed.

    Args:
        begin: the checkpoint to repeat from.
        last_step: the last step.
        ends_run: whether the run had finished there, so that the script ends by itself.
        checkpoints: those after ``from_step``, up to the last step; the newest of each step.
        attempts: the journal files of the run.
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
    """The steps to replay; checkpoints that cannot be opened are left out.

    Args:
        directory: of the run.
        from_step: the newest checkpoint at or before this step is taken.
        num_steps: the last step is ``from_step`` plus this; None: up to the next checkpoint after
            ``from_step``, or the last recorded step.
        to_journal_end: without ``num_steps``, do not end at the next checkpoint.

    Raises:
        CheckpointNotFoundError: there is no such checkpoint.
        ConfigurationError: the last step is not after the checkpoint to begin from.
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
    end = max(_last_recorded(attempts), *(each.name.step for each in readers))
    if num_steps is not None:
        last_step = from_step + num_steps
    elif after and not to_journal_end:
        last_step = after[0].name.step
    else:
        last_step = end
    if last_step <= before[-1].name.step:
        raise ConfigurationError(
            str(directory),
            found=f"neither the journal nor a checkpoint goes beyond step {last_step}",
            expected="--from an earlier step",
        )
    passed = tuple(each for each in after if each.name.step <= last_step)
    # An extended run has finished at an earlier step too.
    finished = [each.name.step for each in passed if each.manifest.finished]
    ends_run = last_step == end and last_step in finished
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


# ---------------------------------------------------------------- running


def replay(
    command: Sequence[str],
    directory: Path,
    *,
    from_step: int,
    num_steps: int | None = None,
    until_differs: bool = False,
    keep: Path | None = None,
    allow_writes: bool = False,
    on_event: Callable[[str], None] = lambda line: None,
) -> ReplayResult:
    """Repeats steps of a run, and says whether they are what the run recorded.

    The command runs once, in the working directory. The Checkpointer of ``directory`` uses a
    scratch directory instead, which begins with one checkpoint; one of another directory runs as in
    any launch. Each rank ends with status 0 after the last step. Other writes below the working and
    the run directory go to an overlay, which is removed at the end. The network is not blocked:
    variables switch off known trackers and the Hub.

    A command that ends earlier with status 0 is no error: the steps that were done are compared,
    and the result, which is not equal, has the number of the others.

    Args:
        command: program and arguments, as the run was started.
        directory: of the run.
        from_step: the newest checkpoint at or before this step is taken.
        num_steps: the last step is ``from_step`` plus this; None: up to the next checkpoint after
            ``from_step``, or the last recorded step.
        until_differs: all ranks end after the first step that differs on one. Without
            ``num_steps``, later checkpoints are compared and do not end the replay.
        keep: an absent or empty directory that becomes the scratch directory and stays.
        allow_writes: where the kernel allows no overlay, run without one, and list the files that
            have changed.
        on_event: called with one line about what happens.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at or before the step.
        ConfigurationError: an argument is wrong; or the kernel allows no overlay.
        CheckpointError: a checkpoint that is compared is damaged.
        ReplayError: the command failed before the last step and nothing differs, or it took no step
            of this run.
        SystemExit: SIGTERM or SIGHUP came, which the command has received too, and has ended.
    """
    chosen = select_steps(directory, from_step, num_steps, to_journal_end=until_differs)
    kept = None if keep is None else _empty(keep, directory)
    with isolated(
        command,
        [Path.cwd(), directory],
        kept,
        example="replay runs/a --from 500",
        allow_writes=allow_writes,
    ) as (isolated_command, scratch):
        overlay = f"{'no ' if isolated_command.obstacle else ''}overlay over the files"
        on_event(
            f"replaying steps {chosen.first_step} to {chosen.last_step} of {directory}, "
            f"from {chosen.begin.name}, {overlay}"
        )
        plan = _prepared(chosen, directory, scratch, until_differs=until_differs)
        result = _result(chosen, scratch, isolated_command.run(plan), command)
        is_protected = not isolated_command.obstacle
        return replace(result, is_protected=is_protected, written=isolated_command.written)


def _prepared(
    chosen: Selection, directory: Path, scratch: Path, *, until_differs: bool
) -> ReplayPlan:
    """The plan; its checkpoint is in the scratch directory then."""
    begin = chosen.begin.path
    shutil.copytree(begin, scratch / begin.name, copy_function=_link_or_copy)
    return ReplayPlan(
        directory=str(directory.resolve()),
        scratch=str(scratch),
        last_step=None if chosen.ends_run else chosen.last_step,
        saved_steps=tuple(each.name.step for each in chosen.checkpoints),
        until_differs=until_differs,
    )


def _empty(keep: Path, directory: Path) -> Path:
    """The run directory of a replay that stays."""
    if keep.resolve().is_relative_to(directory.resolve()):
        raise ConfigurationError(
            str(keep), found="inside the run directory", expected="a directory outside of it"
        )
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigurationError(str(keep), found="it is not empty", expected="a new directory")
    keep.mkdir(parents=True, exist_ok=True)
    return keep.resolve()


def _link_or_copy(source: str, target: str) -> None:
    # Nothing writes to these files, so a link is safe.
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _result(chosen: Selection, scratch: Path, status: int, command: Sequence[str]) -> ReplayResult:
    attempts = find_attempts(scratch / DIRECTORY)
    if not attempts and not status:
        raise ReplayError(
            " ".join(command),
            found="took no step of this run",
            remedy="Give the directory of its Checkpointer, and the arguments that the run was "
            "started with",
        )
    by_rank = (
        [each for each in attempts if each.header.rank == rank]
        for rank in sorted({each.header.rank for each in attempts})
    )
    ranks = tuple(compare_rank(each, chosen.attempts) for each in by_rank)
    done = min((_last_step(each) for each in ranks), default=0)
    # A process may fail after its last step: Gloo's threads abort some that end with a group.
    if status and done < chosen.last_step and all(each.difference is None for each in ranks):
        where = f"after step {done}" if done else "before the first step"
        raise ReplayError(" ".join(command), found=f"ended with exit status {status} {where}")
    return ReplayResult(
        ranks=ranks,
        checkpoints=tuple(
            compare_saved(each, scratch) for each in chosen.checkpoints if each.name.step <= done
        ),
        first_step=chosen.first_step,
        last_step=chosen.last_step,
        written=(),
        is_protected=True,
        exit_status=status,
    )


def _last_step(rank: RankResult) -> int:
    return max((record.step for record in rank.records), default=0)
