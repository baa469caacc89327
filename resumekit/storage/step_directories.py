"""Committed step directories: listed, read, verified and quarantined."""

from __future__ import annotations

import uuid
from pathlib import Path

from resumekit.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError
from resumekit.storage.directories import (
    MANIFEST,
    QUARANTINE,
    StepName,
    find_difference,
    has_directory,
    read_small,
    write_small,
)
from resumekit.storage.file_reader import FileReader
from resumekit.storage.io.file_system import FileSystem, read_errors
from resumekit.storage.json_files import MAX_JSON_BYTES, seal
from resumekit.storage.manifest import Manifest


def list_steps(file_system: FileSystem, directory: Path) -> list[StepName]:
    """The names of all step directories, newest first; their content is not checked.

    Raises:
        OSError: the run directory could not be listed.
    """
    parsed = [StepName.parse(entry.name) for entry in file_system.list(directory)]
    names = [name for name in parsed if name is not None]
    return sorted(names, key=lambda name: (name.step, name.revision), reverse=True)


def read_manifest(file_system: FileSystem, directory: Path, name: StepName) -> Manifest:
    """The verified manifest of a step directory.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        CorruptCheckpointError: it is damaged, or belongs to another step.
        FormatVersionError: a newer version of resumekit wrote it.
        UnreadableCheckpointError: it could not be read.
    """
    root, where = directory / str(name), f"{name}/{MANIFEST}"
    _check_is_directory(file_system, directory, name)
    with read_errors(where):
        if MANIFEST not in {entry.name for entry in file_system.list(root) if entry.kind == "file"}:
            raise CorruptCheckpointError(where, found="is missing or not a regular file")
        data = read_small(file_system, root / MANIFEST, where=where, max_bytes=MAX_JSON_BYTES)
    manifest = Manifest.from_bytes(data, where=where)
    if manifest.name != name:
        raise CorruptCheckpointError(
            where, found=f"is the manifest of {manifest.name}", expected=str(name)
        )
    return manifest


def _check_is_directory(file_system: FileSystem, directory: Path, name: StepName) -> None:
    # A link instead of the directory must not be followed.
    path = directory / str(name)
    with read_errors(str(name)):
        try:
            entry = file_system.entry(path)
        except FileNotFoundError:
            raise CheckpointNotFoundError(str(path), found="there is no such checkpoint") from None
    if entry.kind != "directory":
        raise CorruptCheckpointError(str(name), found="is not a directory", expected="a directory")


class StepReader:
    """A committed step directory: verified manifest, and exactly its files.

    Args:
        file_system: the file system.
        directory: the run directory.
        name: of the step directory.

    Raises:
        CheckpointError: see ``Store.open_step``.
    """

    def __init__(self, file_system: FileSystem, directory: Path, name: StepName) -> None:
        self._file_system = file_system
        self.name = name
        self.path = directory / str(name)
        self.manifest = read_manifest(file_system, directory, name)
        self._entries = {entry.path: entry for entry in self.manifest.files}
        self._check_tree()

    def file(self, path: str) -> FileReader:
        """A file of the checkpoint, for verified reading.

        Args:
            path: as the manifest lists it.

        Raises:
            CorruptCheckpointError: the manifest does not list it, or it has another size.
            UnreadableCheckpointError: it could not be opened.
        """
        where = f"{self.name}/{path}"
        entry = self._entries.get(path)
        if entry is None:
            raise CorruptCheckpointError(where, found="is not listed in the manifest")
        return FileReader(self._file_system, self.path / path, where=where, entry=entry)

    def verify(self) -> None:
        """Reads every byte of every file and compares the digests.

        Raises:
            CorruptCheckpointError: names the first damaged file and both digests.
            UnreadableCheckpointError: a file could not be read.
        """
        for entry in self.manifest.files:
            with self.file(entry.path) as reader:
                reader.verify()

    def _check_tree(self) -> None:
        sizes = {entry.path: entry.size for entry in self.manifest.files}
        with read_errors(str(self.name)):
            difference = find_difference(self._file_system, self.path, sizes, except_file=MANIFEST)
        if difference is not None:
            path, problem = difference
            raise CorruptCheckpointError(f"{self.name}/{path}", found=problem)


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
    file_system.rename(directory / str(name), target)
    # First the new name, then the removal of the old one: a power cut between them loses nothing.
    file_system.fsync_dir(target.parent)
    file_system.fsync_dir(directory)
    return target


def list_quarantined(file_system: FileSystem, directory: Path) -> list[str]:
    """The names of the step directories in quarantine, sorted.

    Raises:
        OSError: it could not be listed.
    """
    if not has_directory(file_system, directory, QUARANTINE):
        return []
    entries = file_system.list(directory / QUARANTINE)
    return [entry.name for entry in entries if entry.kind == "directory"]
