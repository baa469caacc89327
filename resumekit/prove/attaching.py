"""Trials of a script that has a callback attached; its uninterrupted run has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from resumekit.attach import (
    has_imported_trainer,
    lines_for_loop,
    run_directories,
)
from resumekit.cadence import parse_cadence
from resumekit.errors import ProveError
from resumekit.record.moments import (
    CHECKPOINT,
    END,
    RESUMED,
    TracedProcess,
    durable_steps,
    records_of,
)

# How often a trial saves, unless the user chose a cadence.
_SAVES_PER_RUN = 10

_NO_TRAINER = "no Trainer of transformers or Lightning trains in it, so nothing can be attached"


def default_cadence(num_steps: int) -> int:
    """The steps between two saves of a trial.

    Args:
        num_steps: of the uninterrupted run.
    """
    return max(1, num_steps // _SAVES_PER_RUN)


def possible_saves(steps: Sequence[int], save_every: int | str) -> list[int]:
    """The steps after which a trial may save.

    Args:
        steps: of the uninterrupted run.
        save_every: of the callback; with a duration any step.
    """
    cadence = parse_cadence(save_every)
    any_step = cadence.interval_seconds is not None
    return [step for step in steps if any_step or cadence.is_due(step)]


def steps_to_interrupt(
    steps: Sequence[int], save_every: int | str, num_kills: int, command: str
) -> list[int]:
    """The steps among which random kills fall: from the first save.

    Args:
        steps: of the uninterrupted run.
        save_every: of the callback.
        num_kills: how many there are to be.
        command: named in the error.

    Raises:
        ProveError: there are too few.
    """
    saves = possible_saves(steps, save_every)
    left = [step for step in steps if saves and step >= saves[0]]
    if len(left) <= num_kills:
        raise ProveError(
            command,
            found=f"{len(left)} of {len(steps)} steps are left from the first save on, with "
            f"--save-every {save_every}",
            expected=f"more than {num_kills}, one for each kill",
            remedy="Save more often, train longer, or ask for fewer kills",
        )
    return left


def has_checkpoint(run: Path) -> bool:
    """Whether a Trainer has committed a checkpoint in the run directory.

    Args:
        run: the run directory; a second Trainer has one in it.
    """
    return any(run.glob("step-*")) or any(run.glob("trainer-*/step-*"))


def require_trainer(private: Path, command: str, on_event: Callable[[str], None]) -> None:
    """Raises ProveError unless a Trainer was imported before the first step of a launch.

    Args:
        private: of the launch.
        command: named in the error.
        on_event: called with the lines that a loop needs.

    Raises:
        ProveError: the script has a loop of its own, or resumekit in it.
    """
    if not has_imported_trainer(private):
        raise _nothing_attached([private], command, on_event)


def require_attached(
    privates: Sequence[Path], command: str, on_event: Callable[[str], None]
) -> None:
    """Raises ProveError unless a callback was attached to a Trainer of some launch.

    Args:
        privates: of all launches.
        command: named in the error.
        on_event: called with the lines that a loop needs.

    Raises:
        ProveError: no Trainer trained in any of them.
    """
    if not any(map(run_directories, privates)):
        raise _nothing_attached(privates, command, on_event)


def require_save(attempts: Sequence[TracedProcess], command: str) -> None:
    """Raises ProveError unless something was saved before the last kill.

    Args:
        attempts: what the killed launches traced.
        command: named in the error.

    Raises:
        ProveError: no launch had anything to resume from.
    """
    if not durable_steps(attempts):
        raise ProveError(
            command,
            found="killed before its first checkpoint",
            expected="a checkpoint that a killed run can resume from",
            remedy="Save more often (--save-every), or kill it later",
        )


def _nothing_attached(
    privates: Sequence[Path], command: str, on_event: Callable[[str], None]
) -> ProveError:
    lines = next(filter(None, (lines_for_loop(each, "runs/a") for each in privates)), "")
    if not lines:
        return _has_resumekit(command)
    on_event(f"a loop of your own resumes with three more lines:\n{lines}")
    return ProveError(
        command,
        found=_NO_TRAINER,
        expected="a script of the Trainer or of Lightning",
        remedy="Add the two lines of docs/start/pytorch.md to the loop, and leave --with-resumekit "
        "out",
    )


def require_stock(attempts: Sequence[TracedProcess], command: str) -> None:
    """Raises ProveError where the uninterrupted run uses resumekit.

    Args:
        attempts: what the run itself traced.
        command: named in the error.

    Raises:
        ProveError: it has a ``Checkpointer`` or a ``ResumeCallback``.
    """
    if next(records_of(attempts, CHECKPOINT, RESUMED, END), None) is not None:
        raise _has_resumekit(command)


def _has_resumekit(command: str) -> ProveError:
    return ProveError(
        command,
        found="the script has a Checkpointer or a ResumeCallback, so none is attached",
        expected="a script that does not use resumekit",
        remedy="Leave --with-resumekit out: what is in the script is proven",
    )
