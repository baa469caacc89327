"""Which step directories are committed.

One that was renamed into the run directory is. Where a rename is not atomic, a step directory is
written and deleted under its own name, and has a mark next to it, ``step-00000500.incomplete``, as
long as it may lack files: then it counts only while its manifest and all files are there.

The mark is durable before the first file is made or removed. It is removed once the manifest, which
is written last, or the removal of the directory is durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from resumekit.errors import CheckpointError
from resumekit.storage.directories import StepName, remove_tree, write_small
from resumekit.storage.io.file_system import Entry, FileSystem
from resumekit.storage.manifest import StepReader

_MARK = ".incomplete"


def list_steps(file_system: FileSystem, directory: Path) -> list[StepName]:
    """The names of all committed step directories, newest first; their content is not checked.

    Raises:
        OSError: the run directory could not be listed.
    """
    entries = file_system.list(directory)
    incomplete = {
        name for name in _marked(entries) if not is_complete(file_system, directory, name)
    }
    names = [StepName.parse(entry.name) for entry in entries]
    return sorted({name for name in names if name is not None} - incomplete, reverse=True)


def list_marked(file_system: FileSystem, directory: Path) -> list[StepName]:
    """The names of the step directories with a mark, or of which only the mark is left.

    Raises:
        OSError: the run directory could not be listed.
    """
    return _marked(file_system.list(directory))


def is_complete(file_system: FileSystem, directory: Path, name: StepName) -> bool:
    """Whether a step directory has a manifest that verifies, and all its files in full size."""
    try:
        StepReader(file_system, directory, name)
    except CheckpointError:
        return False
    return True


def mark(file_system: FileSystem, directory: Path, name: StepName) -> None:
    """Marks a step directory as incomplete; durable once this returns.

    Raises:
        OSError: as the failing call said.
    """
    with suppress(FileExistsError):
        write_small(file_system, directory / f"{name}{_MARK}", b"counts if its files are there\n")
    file_system.fsync_dir(directory)


def unmark(file_system: FileSystem, directory: Path, name: StepName) -> None:
    """Removes the mark; what it was for is durable.

    Raises:
        OSError: as the failing call said.
    """
    file_system.unlink(directory / f"{name}{_MARK}")


def remove_marked(file_system: FileSystem, directory: Path, name: StepName) -> None:
    """Removes a step directory that has a mark, and then the mark.

    Raises:
        OSError: as the failing call said; the mark stays.
    """
    with suppress(FileNotFoundError):
        remove_tree(file_system, directory / str(name))
    file_system.fsync_dir(directory)
    unmark(file_system, directory, name)


def _marked(entries: Sequence[Entry]) -> list[StepName]:
    stems = [entry.name.removesuffix(_MARK) for entry in entries if entry.name.endswith(_MARK)]
    return [name for name in map(StepName.parse, stems) if name is not None]
