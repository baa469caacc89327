"""Every exception that resumekit raises.

Each names the path, slot or argument, what was found, what was expected and one remedy, and ends
with a code. Each also derives from the builtin that a caller would expect, so ``except ValueError``
keeps working::

    ResumekitError
    ├── ConfigurationError (ValueError)      an argument or a combination of arguments is wrong
    │   └── DeclarationError                 the declaration of a component is wrong
    ├── MissingDependencyError (ImportError) a framework is missing or too old
    ├── UnsupportedValueError (TypeError)    a value that cannot be stored; nothing is written
    ├── InexactError (ValueError)            strict=True, and a component would not be exact
    ├── DirectoryError (OSError)             the run directory cannot be used
    │   ├── DirectoryInUseError              another live job owns it
    │   ├── OwnershipLostError               another attempt took ownership during this one
    │   └── SharedDirectoryError             the ranks do not see the same directory
    ├── PlaceError (OSError)                 a place for copies does not answer, or refuses
    ├── SaveError (OSError)                  a save failed; the previous checkpoint is untouched
    │   └── InsufficientSpaceError           the disk or the quota is full; nothing of it is left
    ├── CheckpointError (RuntimeError)       a checkpoint on disk cannot be used
    │   ├── CheckpointNotFoundError (LookupError) a checkpoint that the user names is missing
    │   ├── CorruptCheckpointError           proven damage: a digest, a size, a manifest
    │   ├── InvalidStateError                intact, but a state is not one that resumekit writes
    │   ├── ForeignCheckpointError           intact, but of another run
    │   ├── FormatVersionError               written by a newer version of the format
    │   ├── UnreadableCheckpointError (OSError) an I/O error; it may succeed the next time
    │   └── NoUsableCheckpointError          checkpoints exist, and none can be used
    ├── StateMismatchError (ValueError)      the checkpoint does not match the live objects
    │   └── DriftError                       the state matches, but a setting has changed
    ├── IncompleteLoadError (RuntimeError)   a load failed half-way; end the process
    ├── DataPositionError (RuntimeError)     the data position cannot be restored
    ├── LoopError (RuntimeError)             the loop makes calls in an invalid order
    ├── RankDisagreementError (RuntimeError) the ranks of one job have different values
    ├── RankFailedError (RuntimeError)       an unexpected error on one rank
    ├── RankLostError (RuntimeError)         a rank died or does not answer
    ├── DivergenceError (RuntimeError)       a repeated step differs from the earlier attempt
    ├── TraceError (RuntimeError)            a trace is missing or damaged
    ├── ReplayError (RuntimeError)           the steps of a run could not be replayed
    └── ProveError (RuntimeError)            the result of a command could not be determined
        ├── CommandFailedError               it failed without being killed
        ├── CommandTimeoutError (TimeoutError) it did not end within the timeout
        └── KillPointNotReachedError             it never reached the point of the kill

``Preempted`` is not an error: a run that received a signal has saved, and ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any, ClassVar

from resumekit.printable import printable

_CODE = re.compile(r" \[RK-\d+\](?: https?://\S+#rk-\d+)?")
_PAGE = re.compile(r"(?<![\w/.])docs/(?=[\w/-]+\.md)")


class ResumekitError(Exception):
    """The base of every error here.

    Args:
        where: the path, slot, FQN or argument.
        found: the value or state found.
        expected: the value or state expected.
        remedy: one command or argument that helps.

    Attributes:
        code: ends the message; ``resumekit explain RK-101`` prints what to do about it. The link to
            that section follows where the installed package knows the address of its pages.
    """

    code: ClassVar[str]

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
        super().__init__(str(self))

    def __str__(self) -> str:
        found = _CODE.sub("", self.found).rstrip(".")  # an error that it quotes ends with both
        sentence = f"{self.where}: {found}"
        if self.expected is not None:
            sentence += f", expected {self.expected}"
        sentence += "."
        if self.remedy is not None:
            sentence += f" {self.remedy.rstrip('.')}{'' if self.remedy.endswith('?') else '.'}"
        text, pages = with_code(printable(sentence), self.code), _address_of_pages()
        if not pages:
            return text
        return f"{_PAGE.sub(pages, text)} {pages}how-to/troubleshooting.md#{self.code.lower()}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are sent between ranks; pickle cannot pass keyword-only arguments by default.
        make = partial(
            type(self), self.where, found=self.found, expected=self.expected, remedy=self.remedy
        )
        return make, ()


@cache
def _address_of_pages() -> str:
    """The address of the directory ``docs/`` of this release; empty where none is known."""
    try:
        urls = metadata("resumekit").get_all("Project-URL") or []
    except PackageNotFoundError:  # a checkout that is not installed
        return ""
    # noxfile.py _address_links writes it when it makes a release.
    known: dict[str, str] = dict(url.split(", ", 1) for url in urls)
    return known.get("Documentation", "").removesuffix("index.md")


def with_code(text: str, code: str) -> str:
    """The text with its code at the end, and without those of the errors that it quotes."""
    return f"{_CODE.sub('', text)} [{code}]"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """``"Did you mean save_every?"`` if a known word is similar, else None."""
    similar = get_close_matches(word, known, n=1)
    return f"Did you mean {similar[0]}?" if similar else None


class ConfigurationError(ResumekitError, ValueError):
    """An argument, or a combination of arguments, is wrong."""

    code = "RK-101"


class DeclarationError(ConfigurationError):
    """The declaration of a component is wrong."""

    code = "RK-102"


class MissingDependencyError(ResumekitError, ImportError):
    """A framework that an adapter needs is missing or too old."""

    code = "RK-103"


class UnsupportedValueError(ResumekitError, TypeError):
    """A value that cannot be stored; raised before anything is written."""

    code = "RK-104"


class InexactError(ResumekitError, ValueError):
    """``strict=True``, and a component would not be restored exactly."""

    code = "RK-105"


class DirectoryError(ResumekitError, OSError):
    """The run directory cannot be used: read-only, not a directory, unreachable."""

    code = "RK-201"


class DirectoryInUseError(DirectoryError):
    """Another live job owns the run directory."""

    code = "RK-202"


class OwnershipLostError(DirectoryError):
    """Another attempt took ownership of the run directory while this one was running."""

    code = "RK-203"


class SharedDirectoryError(DirectoryError):
    """The ranks of the job do not see the same run directory."""

    code = "RK-204"


class PlaceError(ResumekitError, OSError):
    """A place for copies of checkpoints does not answer, or refuses a call."""

    code = "RK-205"


class SaveError(ResumekitError, OSError):
    """A save failed on some rank; nothing was committed, the previous checkpoint is untouched."""

    code = "RK-301"


class InsufficientSpaceError(SaveError):
    """The bytes, the inodes or the quota do not suffice; nothing of the save is left."""

    code = "RK-302"


class CheckpointError(ResumekitError, RuntimeError):
    """The base of the errors about a checkpoint on disk."""

    code = "RK-401"


class CheckpointNotFoundError(CheckpointError, LookupError):
    """A checkpoint that was named explicitly does not exist."""

    code = "RK-402"


class CorruptCheckpointError(CheckpointError):
    """Proven damage: a digest, a size, a name or the manifest itself is wrong."""

    code = "RK-403"


class InvalidStateError(CheckpointError):
    """The bytes are intact, and a state is not one that resumekit writes. It is not moved."""

    code = "RK-404"


class ForeignCheckpointError(CheckpointError):
    """The checkpoint belongs to another run. It is not damaged, so it is not moved."""

    code = "RK-405"


class FormatVersionError(CheckpointError):
    """The checkpoint was written by a newer version of the format."""

    code = "RK-406"


class UnreadableCheckpointError(CheckpointError, OSError):
    """The checkpoint could not be read. Damage is not proven, so it is not moved."""

    code = "RK-407"


class NoUsableCheckpointError(CheckpointError):
    """Checkpoints exist, and none can be used. A run never starts from scratch over them."""

    code = "RK-408"


class StateMismatchError(ResumekitError, ValueError):
    """The checkpoint does not match the live objects: a slot, an FQN, a shape, a class."""

    code = "RK-501"


class DriftError(StateMismatchError):
    """The state matches, but a setting of the run has changed since the checkpoint."""

    code = "RK-502"


class IncompleteLoadError(ResumekitError, RuntimeError):
    """A load failed when some live objects were changed already; the process has to end."""

    code = "RK-503"


class DataPositionError(ResumekitError, RuntimeError):
    """The position in the data cannot be restored."""

    code = "RK-504"


class LoopError(ResumekitError, RuntimeError):
    """The training loop makes calls in an invalid order."""

    code = "RK-505"


class RankFailedError(ResumekitError, RuntimeError):
    """An unexpected error on one rank while the others waited for it."""

    code = "RK-602"


class RankLostError(ResumekitError, RuntimeError):
    """A rank died or does not answer; the others cannot continue without it."""

    code = "RK-603"


class RankDisagreementError(ResumekitError, RuntimeError):
    """The ranks of one job have different values where they must agree."""

    code = "RK-601"


class DivergenceError(ResumekitError, RuntimeError):
    """``on_divergence="raise"``, and a repeated step differs from what the journal recorded."""

    code = "RK-701"


class TraceError(ResumekitError, RuntimeError):
    """A trace is missing, or a line in it is damaged (a torn last line is not damage)."""

    code = "RK-702"


class ReplayError(ResumekitError, RuntimeError):
    """The steps of a run could not be replayed: the command failed, or trains another run."""

    code = "RK-703"


class ProveError(ResumekitError, RuntimeError):
    """The result of a command could not be determined; it may or may not resume exactly."""

    code = "RK-704"


class CommandFailedError(ProveError):
    """The command failed without being killed."""

    code = "RK-705"


class CommandTimeoutError(ProveError, TimeoutError):
    """The command did not end within its timeout."""

    code = "RK-706"


class KillPointNotReachedError(ProveError):
    """The command never reached the point at which it was to be killed."""

    code = "RK-707"


class Preempted(SystemExit):
    """A signal stopped the run: it has saved at a step boundary, and the process ends.

    Every rank raises it at the same boundary, whichever of them had the signal. Let it pass, as
    ``SystemExit`` passes ``except Exception``: the exit status is ``128 +`` the signal's number,
    and the same command resumes from there.

    Args:
        signal_number: e.g. 15 for SIGTERM.
        step: the optimizer step of the newest checkpoint; 0 if there is none.
    """

    def __init__(self, signal_number: int, step: int) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number
        self.step = step
