"""Damaged step directories, put aside with the reason beside them. Nothing is deleted here."""

from __future__ import annotations

import uuid
from pathlib import Path

from resumekit.errors import ConfigurationError, CorruptCheckpointError
from resumekit.storage.io import FileSystem
from resumekit.storage.names import QUARANTINE, StepName
from resumekit.storage.sealed import seal
from resumekit.storage.tree import has_directory, write_small


def put_aside(
    file_system: FileSystem, directory: Path, name: StepName, error: CorruptCheckpointError
) -> Path:
    """Where a damaged step directory is now.

    Args:
        file_system: the seam.
        directory: the run directory.
        name: of the step directory.
        error: the proof of the damage.

    Raises:
        ConfigurationError: the error proves no damage.
        OSError: as the failing call said; the step directory stays, or is in quarantine.
    """
    if not isinstance(error, CorruptCheckpointError):
        raise ConfigurationError(
            str(name), found=f"a {type(error).__name__}", expected="proven damage"
        )
    # A link of this name is no directory: mkdir refuses it.
    if not has_directory(file_system, directory, QUARANTINE):
        file_system.mkdir(directory / QUARANTINE)
    # Even where it was there: a process that was killed here may have made it a moment ago.
    file_system.fsync_dir(directory)
    target = directory / QUARANTINE / f"{name}-{uuid.uuid4().hex[:12]}"
    reason = seal({"checkpoint": str(name), "error": str(error)})
    write_small(file_system, target.with_name(f"{target.name}.reason.json"), reason)
    file_system.rename(directory / str(name), target)
    # There first, gone second: a power cut between the two loses nothing.
    file_system.fsync_dir(target.parent)
    file_system.fsync_dir(directory)
    return target


def list_quarantine(file_system: FileSystem, directory: Path) -> list[str]:
    """The names of the step directories in quarantine, sorted.

    Raises:
        OSError: it could not be listed.
    """
    if not has_directory(file_system, directory, QUARANTINE):
        return []
    entries = file_system.list(directory / QUARANTINE)
    return [entry.name for entry in entries if entry.kind == "directory"]
