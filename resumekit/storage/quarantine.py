"""The quarantine of a run directory: damaged checkpoints, each with the reason in a file."""

from __future__ import annotations

import uuid
from pathlib import Path

from resumekit.errors import ConfigurationError, CorruptCheckpointError
from resumekit.storage.directories import (
    QUARANTINE,
    StepName,
    has_directory,
    rename_directory,
    seal,
    write_small,
)
from resumekit.storage.io.file_system import FileSystem


def quarantine_step(
    file_system: FileSystem, directory: Path, name: StepName, error: CorruptCheckpointError
) -> Path:
    """Moves a damaged step directory; returns its new path.

    Args:
        file_system: the file system.
        directory: the run directory.
        name: of the step directory.
        error: the proof of the damage.

    Raises:
        ConfigurationError: the error is no proof of damage.
        OSError: as the failing call said; the step directory stays, or is in quarantine.
    """
    if not isinstance(error, CorruptCheckpointError):
        raise ConfigurationError(
            str(name), found=f"a {type(error).__name__}", expected="proven damage"
        )
    # A link of this name is no directory: mkdir refuses it.
    if not has_directory(file_system, directory, QUARANTINE):
        file_system.mkdir(directory / QUARANTINE)
    # Also for an existing one: a process killed here may have created it.
    file_system.fsync_dir(directory)
    target = directory / QUARANTINE / f"{name}-{uuid.uuid4().hex[:12]}"
    reason = seal({"checkpoint": str(name), "error": str(error)})
    write_small(file_system, target.with_name(f"{target.name}.reason.json"), reason)
    _move(file_system, directory / str(name), target)
    # First the new name, then the removal of the old one: a power cut between them loses nothing.
    file_system.fsync_dir(target.parent)
    file_system.fsync_dir(directory)
    return target


def _move(file_system: FileSystem, source: Path, target: Path) -> None:
    """Renames a directory, or else each file in it: the checkpoint is damaged already."""
    if rename_directory(file_system, source, target):
        return
    file_system.mkdir(target)
    for entry in file_system.list(source):
        if entry.kind == "directory":
            _move(file_system, source / entry.name, target / entry.name)
        else:
            file_system.rename(source / entry.name, target / entry.name)
    file_system.fsync_dir(target)
    file_system.rmdir(source)


def list_quarantined(file_system: FileSystem, directory: Path) -> list[str]:
    """The names of the step directories in quarantine, sorted.

    Raises:
        OSError: it could not be listed.
    """
    if not has_directory(file_system, directory, QUARANTINE):
        return []
    entries = file_system.list(directory / QUARANTINE)
    names = [entry.name for entry in entries if entry.kind == "directory"]
    return [name for name in names if StepName.parse(name.rpartition("-")[0]) is not None]
