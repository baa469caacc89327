"""Every exception that resumekit raises.

Each one says where it happened, what was found, what was expected and one remedy, and also derives
from the builtin that a caller would expect, so ``except ValueError`` keeps working::

    ResumekitError
    ├── ConfigurationError (ValueError)      an argument or a combination of arguments is wrong
    │   └── DeclarationError                 a component is declared in a way that cannot be right
    ├── MissingDependencyError (ImportError) a framework is missing or too old
    ├── UnsupportedValueError (TypeError)    a value that cannot be stored, refused before any write
    ├── InexactError                         strict=True and something would not come back exactly
    ├── DirectoryError (OSError)             the run directory cannot be used
    │   ├── DirectoryInUseError              another live job owns it
    │   ├── OwnershipLostError               another attempt took it over while this one ran
    │   └── SharedDirectoryError             the ranks do not see one directory
    ├── SaveError (OSError)                  a save failed; the previous checkpoint is untouched
    │   └── InsufficientSpaceError           refused before anything was written
    ├── CheckpointError
    │   ├── CheckpointNotFoundError (LookupError) a checkpoint named by the user is not there
    │   ├── CorruptCheckpointError           proven damage: a digest, a size, a manifest
    │   ├── ForeignCheckpointError           whole, and of another run
    │   ├── FormatVersionError               written by a newer version of the format
    │   ├── UnreadableCheckpointError (OSError) an I/O error; it may be fine the next time
    │   └── NoUsableCheckpointError          checkpoints are there, and none can be used
    ├── StateMismatchError (ValueError)      the checkpoint does not fit the live objects
    │   └── DriftError                       it fits, but a setting that shapes the run has changed
    ├── DataPositionError                    the data position cannot be found again
    ├── LoopError (RuntimeError)             the loop called things in an order that has no meaning
    ├── RankDisagreementError (RuntimeError) the ranks of one job said different things
    ├── RankFailedError (RuntimeError)       something unforeseen failed on one rank
    ├── RankLostError (RuntimeError)         a rank has died or does not answer
    ├── DivergenceError                      a repeated step is not what an earlier attempt recorded
    ├── TraceError                           a trace is missing or damaged
    └── ProveError                           a command could not be judged
        ├── CommandFailedError               it failed without anybody killing it
        ├── CommandTimeoutError (TimeoutError) it did not end in the time it was given
        └── PlaceNotReachedError             it never came to the place where it was to be killed

``Preempted`` is no error: a run that was asked to leave has saved, and ends with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class ResumekitError(Exception):
    """The base of every error here.

    Args:
        where: the path, slot, FQN or argument in question.
        found: what is there.
        expected: what should be there.
        remedy: one command or argument that helps.
    """

    def __init__(
        self,
        where: str,
        *,
        found: str,
        expected: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.where = where
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        sentence = f"{self.where}: {self.found}"
        if self.expected is not None:
            sentence += f", expected {self.expected}"
        sentence += "."
        if self.remedy is not None:
            sentence += f" {self.remedy.rstrip('.')}{'' if self.remedy.endswith('?') else '.'}"
        return sentence

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors travel between ranks; the default protocol cannot rebuild keyword-only arguments.
        return (_rebuild, (type(self), self.where, self.found, self.expected, self.remedy))

    def __str__(self) -> str:
        # OSError and ImportError among the bases would otherwise choose their own wording.
        return self._sentence()


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """``"Did you mean save_every?"`` where a known word is like this one, else None."""
    similar = get_close_matches(word, known, n=1)
    return f"Did you mean {similar[0]}?" if similar else None


def _rebuild(
    kind: type[ResumekitError], where: str, found: str, expected: str | None, remedy: str | None
) -> ResumekitError:
    return kind(where, found=found, expected=expected, remedy=remedy)


class ConfigurationError(ResumekitError, ValueError):
    """An argument, or a combination of arguments, is wrong."""


class DeclarationError(ConfigurationError):
    """A component is declared in a way that cannot be right."""


class MissingDependencyError(ResumekitError, ImportError):
    """A framework that an adapter needs is missing or too old."""


class UnsupportedValueError(ResumekitError, TypeError):
    """A value that cannot be stored; raised before anything is written."""


class InexactError(ResumekitError):
    """``strict=True`` was asked for, and something would not come back exactly."""


class DirectoryError(ResumekitError, OSError):
    """The run directory cannot be used: read-only, not a directory, unreachable."""


class DirectoryInUseError(DirectoryError):
    """Another live job owns the run directory."""


class OwnershipLostError(DirectoryError):
    """Another attempt took the run directory over while this one was running."""


class SharedDirectoryError(DirectoryError):
    """The ranks of the job do not see one and the same run directory."""


class SaveError(ResumekitError, OSError):
    """A save failed on some rank; nothing was committed, the previous checkpoint is untouched."""


class InsufficientSpaceError(SaveError):
    """There is no room for the save; found out before anything was written."""


class CheckpointError(ResumekitError):
    """The base of what can be wrong with a checkpoint on disk."""


class CheckpointNotFoundError(CheckpointError, LookupError):
    """A checkpoint that was named explicitly is not there."""


class CorruptCheckpointError(CheckpointError):
    """Proven damage: a digest, a size, a name or the manifest itself is wrong."""


class ForeignCheckpointError(CheckpointError):
    """The checkpoint belongs to another run. Nothing proves it damaged, so it stays in place."""


class FormatVersionError(CheckpointError):
    """The checkpoint was written by a newer version of the format."""


class UnreadableCheckpointError(CheckpointError, OSError):
    """The checkpoint could not be read; nothing proves that it is damaged, so it stays in place."""


class NoUsableCheckpointError(CheckpointError):
    """Checkpoints are there, and none of them can be used. A run never starts afresh over them."""


class StateMismatchError(ResumekitError, ValueError):
    """The checkpoint does not fit the live objects: a slot, an FQN, a shape, a class."""


class DriftError(StateMismatchError):
    """The state fits, but a setting that shapes the run has changed since the checkpoint."""


class DataPositionError(ResumekitError):
    """The position in the data cannot be found again."""


class LoopError(ResumekitError, RuntimeError):
    """The training loop called things in an order that has no meaning."""


class RankFailedError(ResumekitError, RuntimeError):
    """Something unforeseen failed on one rank while the others waited for it."""


class RankLostError(ResumekitError, RuntimeError):
    """A rank has died or does not answer; the others cannot go on without it."""


class RankDisagreementError(ResumekitError, RuntimeError):
    """The ranks of one job said different things where they must agree."""


class DivergenceError(ResumekitError):
    """``on_divergence="raise"``, and a repeated step differs from what the journal recorded."""


class TraceError(ResumekitError):
    """A trace is missing, or a line in it is damaged (a torn last line is not damage)."""


class ProveError(ResumekitError):
    """A command could not be judged; this says nothing about whether it resumes exactly."""


class CommandFailedError(ProveError):
    """The command failed without anybody killing it."""


class CommandTimeoutError(ProveError, TimeoutError):
    """The command did not end in the time it was given."""


class PlaceNotReachedError(ProveError):
    """The command never came to the place where it was to be killed."""


class Preempted(SystemExit):
    """A signal asked the run to leave: it has saved at a step boundary, and the process ends.

    Every rank raises it at the same boundary, whichever of them had the signal. Let it pass, as
    ``SystemExit`` passes ``except Exception``: the exit status is ``128 +`` the signal's number,
    and the same command goes on from there.

    Args:
        signal_number: e.g. 15 for SIGTERM.
        step: the optimizer step that was saved.
    """

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number
        self.step = step
