"""What lies in a directory that no run has used yet."""

from __future__ import annotations

from pathlib import Path

from resumekit.errors import DirectoryError
from resumekit.storage.io import FileSystem
from resumekit.storage.names import LATEST, LOCK, OWNER, QUARANTINE, STAGING, StepName

_OF_A_RUN = frozenset({OWNER, LOCK, STAGING, QUARANTINE})
_NUM_NAMED = 3


def what_others_left(file_system: FileSystem, directory: Path) -> str:
    """A few of the names in a directory that no run has used; empty where one has, or in no names.

    Raises:
        DirectoryError: they are checkpoints of something else, which has a ``latest`` too. A run
            that starts afresh beside them is not what somebody meant who named this directory.
        OSError: the directory could not be listed.
    """
    entries = {entry.name: entry.kind for entry in file_system.list(directory)}
    if any(name in _OF_A_RUN or StepName.parse(name) is not None for name in entries):
        return ""
    names, more = sorted(entries), len(entries) - _NUM_NAMED
    words = ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
    if entries.get(LATEST) == "file":
        raise DirectoryError(
            str(directory),
            found=f"no run, but the checkpoints of something else ({words})",
            expected="an empty directory, or that of a run",
            remedy="Give the run a directory of its own",
        )
    return words
