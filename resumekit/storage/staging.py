"""A checkpoint in the making: a directory in ``.staging`` that nobody reads until it is renamed."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from resumekit.errors import ConfigurationError, InsufficientSpaceError, SharedDirectoryError
from resumekit.storage.failures import saving
from resumekit.storage.files import FileWriter
from resumekit.storage.io import FileSystem
from resumekit.storage.names import STAGING, StepName, directories_of, path_problem
from resumekit.storage.tree import exists

_NAME = re.compile(r"(step-[0-9]+(?:-r[0-9]+)?)-([0-9a-f]{32})-([0-9a-f]{12})")
_BLOCK_BYTES = 4096  # what a file or a directory may take beyond its bytes
_MANIFEST_BYTES = 64 << 10


class Staging:
    """Where the ranks of one job put the files of one checkpoint.

    Args:
        file_system: the seam.
        directory: the run directory.
        name: of the directory in ``.staging``; other ranks attach to it by this name.
        step: what it will be called once it is committed.
        directories: sub-directories that were made in it, parents first.
    """

    def __init__(
        self,
        file_system: FileSystem,
        directory: Path,
        name: str,
        *,
        step: StepName,
        directories: Sequence[str] = (),
    ) -> None:
        self._file_system = file_system
        self.name = name
        self.path = directory / STAGING / name
        self.step = step
        self.directories = tuple(directories)

    def create(self, path: str, *, writer: int) -> FileWriter:
        """A new file of the checkpoint.

        Args:
            path: relative, in one of the sub-directories that were asked for.
            writer: the rank that writes it.

        Raises:
            ConfigurationError: this cannot be a path in a checkpoint.
            SaveError: it could not be created.
        """
        problem = path_problem(path)
        if problem is not None:
            raise ConfigurationError(repr(path), found=problem, expected="a path such as 'state/a'")
        return FileWriter(self._file_system, self.path / path, relative=path, writer=writer)


def new_staging(
    file_system: FileSystem,
    directory: Path,
    step: StepName,
    *,
    attempt: str,
    directories: Sequence[str],
) -> Staging:
    """A staging of its own name; nothing is made yet."""
    for path in directories:
        problem = path_problem(path)
        if problem is not None:
            raise ConfigurationError(repr(path), found=problem, expected="a directory like 'state'")
    name = f"{step}-{attempt}-{uuid.uuid4().hex[:12]}"
    wanted = directories_of(f"{path}/file" for path in directories)
    return Staging(file_system, directory, name, step=step, directories=wanted)


def make_directories(file_system: FileSystem, staging: Staging) -> None:
    """Makes the staging directory and its sub-directories.

    Raises:
        SaveError: names the one that could not be made.
    """
    for path in (staging.path, *(staging.path / part for part in staging.directories)):
        with saving(path):
            file_system.mkdir(path)


def attach_staging(file_system: FileSystem, directory: Path, name: str) -> Staging:
    """The staging that rank 0 has made, seen from another rank.

    Raises:
        ConfigurationError: this is not the name of one.
        SharedDirectoryError: this rank cannot see it.
    """
    match = _NAME.fullmatch(name)
    step = StepName.parse(match[1]) if match else None
    if step is None:
        raise ConfigurationError(repr(name), found="not the name of a staging directory")
    staging = Staging(file_system, directory, name, step=step)
    if not exists(file_system, staging.path):
        raise SharedDirectoryError(
            str(staging.path),
            found="this rank does not see what rank 0 has made",
            expected="one directory that all ranks share",
        )
    return staging


def check_space(
    file_system: FileSystem, directory: Path, *, num_bytes: int, num_files: int
) -> None:
    """Makes sure that a checkpoint has room.

    Args:
        file_system: the seam.
        directory: the run directory.
        num_bytes: of all files together, the manifest aside.
        num_files: files and directories, the manifest aside.

    Raises:
        InsufficientSpaceError: says how much is there and how much it takes.
        SaveError: the file system does not say.
    """
    with saving(directory):
        free = file_system.free(directory)
    needed_bytes = num_bytes + _MANIFEST_BYTES + _BLOCK_BYTES * (num_files + 1)
    remedy = "Free space, or lower keep_latest"
    if free.num_bytes < needed_bytes:
        raise InsufficientSpaceError(
            str(directory),
            found=f"{free.num_bytes:,} bytes are free",
            expected=f"{needed_bytes:,} for the checkpoint",
            remedy=remedy,
        )
    if free.num_inodes is not None and free.num_inodes < num_files + 2:
        raise InsufficientSpaceError(
            str(directory),
            found=f"{free.num_inodes} more files can be made",
            expected=f"{num_files + 2} for the checkpoint",
            remedy=remedy,
        )
