"""One committed step directory, for reading."""

from __future__ import annotations

from pathlib import Path

from resumekit.errors import CheckpointNotFoundError, CorruptCheckpointError
from resumekit.storage.failures import reading
from resumekit.storage.files import FileReader
from resumekit.storage.io import FileSystem
from resumekit.storage.manifest import Manifest
from resumekit.storage.names import MANIFEST, StepName
from resumekit.storage.sealed import MAX_JSON_BYTES
from resumekit.storage.tree import find_difference, read_small


def list_steps(file_system: FileSystem, directory: Path) -> list[StepName]:
    """The names of all step directories, newest first; they are not looked into.

    Raises:
        OSError: the run directory could not be listed.
    """
    names = [StepName.parse(entry.name) for entry in file_system.list(directory)]
    return sorted((name for name in names if name is not None), reverse=True)


def read_manifest(file_system: FileSystem, directory: Path, name: StepName) -> Manifest:
    """The manifest of a step directory, verified, and of that step.

    Raises:
        CheckpointNotFoundError: there is no such directory.
        CorruptCheckpointError: it is damaged, or belongs to another step.
        FormatVersionError: a newer version of resumekit wrote it.
        UnreadableCheckpointError: it could not be read.
    """
    root, where = directory / str(name), f"{name}/{MANIFEST}"
    _check_is_directory(file_system, directory, name)
    with reading(where):
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
    # Through the parent's list: a link in the place of the directory must not be followed.
    with reading(str(directory)):
        kinds = {entry.name: entry.kind for entry in file_system.list(directory)}
    kind = kinds.get(str(name))
    if kind is None:
        raise CheckpointNotFoundError(
            str(directory / str(name)), found="there is no such checkpoint"
        )
    if kind != "directory":
        raise CorruptCheckpointError(str(name), found="is not a directory", expected="a directory")


class StepReader:
    """A step directory whose manifest is verified and whose files are those it lists.

    Args:
        file_system: the seam.
        directory: the run directory.
        name: of the step directory.

    Raises:
        CheckpointError: the one of its family that fits.
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
        with reading(str(self.name)):
            difference = find_difference(self._file_system, self.path, sizes, besides=MANIFEST)
        if difference is not None:
            path, problem = difference
            raise CorruptCheckpointError(f"{self.name}/{path}", found=problem)
