"""How a checkpoint is committed, and how it is deleted.

Staging is never read. In a commit each step is durable before the next one begins, so that a power
cut leaves the rename undone, or done over complete content:

1. every rank has synced its own files (``Staging.writing``) and reported that, by a collective or
   by a part file (``parts.py``),
2. the part files are removed; the manifest is written,
3. the manifest and every directory in staging are synced,
4. the owner record still names this attempt, and the target is free,
5. one rename, and a sync of the run directory. The checkpoint exists from now on.

What is synced within one step has no order, and is synced at the same time.

Where a rename is not atomic, a checkpoint is written and deleted in place, see ``committed.py``:
the manifest is written last, in place of the rename, and removed first.

A deleted checkpoint is renamed into ``.staging`` at once. Its bytes go later, and only when the
rename is durable: otherwise a power cut could restore the name of half a checkpoint. Before that it
restores a whole one, so only the removal of the bytes waits for the sync. Where the sync failed,
nothing proves that the rename ever will be durable, as a failed sync is never retried: that
checkpoint stays in ``.staging`` until the next attempt.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence, Set
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path

from resumekit.errors import (
    ConfigurationError,
    CorruptCheckpointError,
    InsufficientSpaceError,
    SaveError,
    SharedDirectoryError,
)
from resumekit.log import logger, warn
from resumekit.storage.committed import (
    is_complete,
    list_marked,
    list_steps,
    mark,
    remove_marked,
    unmark,
)
from resumekit.storage.directories import (
    LATEST,
    MANIFEST,
    STAGING,
    StepName,
    directories_of,
    exists,
    find_differences,
    is_taken,
    path_problem,
    remove_tree,
    rename_directory,
    replace_small,
)
from resumekit.storage.file_reader import link_file, read_blocks
from resumekit.storage.files import FileEntry, FileWriter
from resumekit.storage.io.file_system import MAKE_ROOM, FileSystem, Kind, describe, save_errors
from resumekit.storage.io.pipeline import UnsyncedFiles
from resumekit.storage.manifest import Manifest
from resumekit.storage.ownership import Owner, check_owner
from resumekit.storage.parts import PARTS, Part, Parts, leave_part

_NAME = re.compile(r"(step-[0-9]+(?:-r[0-9]+)?)-([0-9a-f]{32})-([0-9a-f]{12})")
_BLOCK_BYTES = 4096  # more than its bytes that a file or directory may take
_MANIFEST_BYTES = 64 << 10


class Staging:
    """The staging directory of one checkpoint, to which all ranks write.

    Args:
        file_system: the file system.
        directory: the run directory.
        name: of the directory in ``.staging``, or of the step directory where the checkpoint is
            written in place; other ranks attach by it.
        step: its name after the commit.
        directories: its sub-directories, parents first.
        with_parts: whether the ranks report by part files.
    """

    def __init__(
        self,
        file_system: FileSystem,
        directory: Path,
        name: str,
        *,
        step: StepName,
        directories: Sequence[str] = (),
        with_parts: bool = False,
    ) -> None:
        self._file_system = file_system
        self._directory = directory
        self.name = name
        self._is_in_place = name == str(step)
        self.path = directory / name if self._is_in_place else directory / STAGING / name
        self.step = step
        self.directories = tuple(directories)
        self._with_parts = with_parts
        self._unsynced = UnsyncedFiles(file_system)

    @classmethod
    def new(
        cls,
        file_system: FileSystem,
        directory: Path,
        step: StepName,
        *,
        attempt: str,
        directories: Sequence[str],
        with_parts: bool = False,
        is_in_place: bool = False,
    ) -> Staging:
        """A staging directory with a unique name; not created yet."""
        for path in directories:
            _check_path(path, "a directory like 'state'")
        name = str(step) if is_in_place else f"{step}-{attempt}-{uuid.uuid4().hex[:12]}"
        wanted = directories_of(f"{path}/file" for path in directories)
        return cls(
            *(file_system, directory, name),
            step=step,
            directories=wanted,
            with_parts=with_parts,
        )

    @classmethod
    def attach(cls, file_system: FileSystem, directory: Path, name: str) -> Staging:
        """The staging directory that rank 0 has created, on another rank.

        Raises:
            ConfigurationError: this is no such name.
            SharedDirectoryError: this rank cannot see it.
        """
        match = _NAME.fullmatch(name)
        step = StepName.parse(match[1] if match else name)
        if step is None:
            raise ConfigurationError(repr(name), found="not the name of a staging directory")
        staging = cls(file_system, directory, name, step=step)
        if not exists(file_system, staging.path):
            raise SharedDirectoryError(
                str(staging.path),
                found="this rank does not see what rank 0 has made",
                expected="one directory that all ranks share",
            )
        return staging

    def make_directories(self) -> None:
        """Creates the staging directory and its sub-directories.

        Raises:
            SaveError: names the one that could not be created.
        """
        if self._is_in_place:
            with save_errors(self.path):
                mark(self._file_system, self._directory, self.step)
        parts = [PARTS] if self._with_parts else []
        for name in ("", *self.directories, *parts):
            with save_errors(self.path / name):
                self._file_system.mkdir(self.path / name)

    def writing(self) -> AbstractContextManager[object]:
        """Files that are finished in the body survive a power cut once it is left.

        Raises:
            SaveError: at its end, a sync has failed.
        """
        return self._unsynced

    def create(self, path: str, *, writer: int) -> FileWriter:
        """A new file of the checkpoint, durable at the end of ``writing``.

        Args:
            path: relative, in one of the requested sub-directories.
            writer: the rank that writes it.

        Raises:
            ConfigurationError: this cannot be a path in a checkpoint.
            SaveError: it could not be created.
        """
        _check_path(path, "a path such as 'state/a'")
        return self._new_file(path, writer=writer)

    def discard(self) -> None:
        """Closes the files that were finished, and not synced because of an error."""
        self._unsynced.discard()

    def remove(self) -> None:
        """Removes it with its files.

        Raises:
            OSError: as the failing call said; the next ``Trash.sweep`` removes the rest.
        """
        if self._is_in_place:
            remove_marked(self._file_system, self._directory, self.step)
        else:
            remove_tree(self._file_system, self.path)

    def _new_file(self, path: str, *, writer: int) -> FileWriter:
        return FileWriter(
            *(self._file_system, self.path / path),
            relative=path,
            writer=writer,
            unsynced=self._unsynced,
        )

    def leave_part(self, part: Part) -> None:
        """Reports to rank 0 that this rank has finished its files, or has failed.

        Raises:
            SaveError: the part could not be written. The rank counts as missing.
        """
        leave_part(self._file_system, self.path / PARTS, part)

    def parts(self, *, run_id: str, attempt: str, save_number: int, world_size: int) -> Parts:
        """The parts that ranks leave of this save. Rank 0 only.

        Args:
            run_id: of the run.
            attempt: of this attempt.
            save_number: of this save; parts of another one are ignored.
            world_size: how many ranks leave a part.
        """
        expected = Part(run_id, attempt, self.step.step, save_number, rank=0)
        return Parts(self._file_system, self.path / PARTS, expected=expected, world_size=world_size)

    def link(self, path: str, source: StepName) -> bool:
        """Whether a file of a committed checkpoint is now a file of this one, under the same path.

        False where that is impossible: across file systems, without support for links, with too
        many of them, or where the earlier checkpoint is gone. Then the file is to be written.

        Args:
            path: as given to ``create``.
            source: the earlier checkpoint; its file is durable.
        """
        _check_path(path, "a path such as 'state/a'")
        try:
            self._file_system.link(self._directory / str(source) / path, self.path / path)
        except OSError as error:
            logger.debug("%s is written again, not linked: %s", path, describe(error))
            return False
        return True

    def take(self, source: Path, entry: FileEntry) -> None:
        """A file of another run's checkpoint becomes a file of this one: a link, or else a copy.

        Args:
            source: the file; it is durable.
            entry: its line in that checkpoint's manifest.

        Raises:
            CheckpointError: it could not be read, or is not what the manifest says.
            SaveError: it could not be written.
        """
        if not link_file(self._file_system, source, self.path / entry.path):
            self.copy(entry, read_blocks(self._file_system, source, entry.size))

    def copy(self, entry: FileEntry, blocks: Iterable[memoryview]) -> None:
        """Writes a file of a checkpoint that is copied, and compares its digest.

        Args:
            entry: its line in that checkpoint's manifest.
            blocks: its bytes.

        Raises:
            CorruptCheckpointError: they are not what the manifest says.
            SaveError: it could not be written.
        """
        with self.create(entry.path, writer=entry.writer) as writer:
            for block in blocks:
                writer.write([block])
            written = writer.finish()
        if written != entry:
            raise CorruptCheckpointError(
                f"{self.step}/{entry.path}",
                found=f"its digest is {written.digest}, of {written.size} bytes",
                expected=f"{entry.digest}, of {entry.size} bytes",
            )

    def commit(self, manifest: Manifest, owner: Owner, *, is_copy: bool = False) -> Path:
        """The step directory, durable once this returns.

        Args:
            manifest: of this attempt and this step; all its files are durable.
            owner: this attempt.
            is_copy: the manifest may be of another attempt of the same run.

        Raises:
            ConfigurationError: the manifest is of another run, attempt or step.
            UnsupportedValueError: the manifest holds a value that could not be read back.
            OwnershipLostError: another attempt has taken over the directory.
            SaveError: names the path and the cause. If only the last sync failed, the step
                directory exists and is complete, but may not survive a power cut.
        """
        attempt = manifest.attempt if is_copy else owner.attempt
        self._check_identity(manifest, replace(owner, attempt=attempt))
        data = manifest.to_bytes()
        used = self._without_leftovers(manifest)
        if self._is_in_place:
            self._commit_by_manifest(data, manifest, owner, used)
        else:
            self._commit_by_rename(data, manifest, owner, used)
        self._point_latest(is_copy=is_copy)
        return self._directory / str(self.step)

    def _commit_by_rename(
        self, data: bytes, manifest: Manifest, owner: Owner, used: Sequence[Path]
    ) -> None:
        file_system, directory = self._file_system, self._directory
        written = self._write_manifest(data)
        self._check_files((*manifest.files, written))
        self._unsynced.sync([*used, self.path])
        self._check_owner(owner)
        target = directory / str(self.step)
        with save_errors(target):
            if is_taken(file_system, target):
                raise SaveError(str(target), found="is there already", expected="a free name")
            file_system.rename(self.path, target)
        # The removal of the old name must be durable too: the next save cleans staging.
        self._unsynced.sync([directory, directory / STAGING])

    def _commit_by_manifest(
        self, data: bytes, manifest: Manifest, owner: Owner, used: Sequence[Path]
    ) -> None:
        self._check_files(manifest.files)
        self._unsynced.sync([*used, self._directory])
        self._check_owner(owner)
        self._write_manifest(data)
        self._unsynced.sync([self.path])
        with suppress(OSError):  # the mark says nothing of a complete checkpoint
            unmark(self._file_system, self._directory, self.step)

    def _check_owner(self, owner: Owner) -> None:
        with save_errors(self._directory):
            check_owner(self._file_system, self._directory, owner)

    def _check_identity(self, manifest: Manifest, owner: Owner) -> None:
        found = (manifest.run_id, manifest.attempt, manifest.name)
        expected = (owner.run_id, owner.attempt, self.step)
        if found != expected:
            raise ConfigurationError(
                "manifest",
                found="run {}, attempt {}, {}".format(*found),
                expected="run {}, attempt {}, {}".format(*expected),
            )

    def _without_leftovers(self, manifest: Manifest) -> list[Path]:
        """Removes part files and unused directories; the paths of the others, children first."""
        if self._with_parts:
            with save_errors(self.path / PARTS):
                remove_tree(self._file_system, self.path / PARTS)
        used = directories_of(entry.path for entry in manifest.files)
        for part in reversed([part for part in self.directories if part not in used]):
            with save_errors(self.path / part):
                self._file_system.rmdir(self.path / part)
        return [self.path / part for part in reversed(used)]

    def _write_manifest(self, data: bytes) -> FileEntry:
        with self._new_file(MANIFEST, writer=0) as writer:
            writer.write([memoryview(data)])
            return writer.finish()

    def _check_files(self, files: Sequence[FileEntry]) -> None:
        """Raises SaveError unless exactly these files are there, in full size."""
        with save_errors(self.path):
            sizes = {entry.path: entry.size for entry in files}
            difference = next(find_differences(self._file_system, self.path, sizes), None)
        if difference is not None:
            raise SaveError(str(self.path / difference.path), found=difference.problem)

    def _point_latest(self, *, is_copy: bool) -> None:
        """Names the newest step for people. Not synced, and may fail: nothing reads it.

        Args:
            is_copy: there may be newer ones.
        """
        path, draft = self._directory / LATEST, self._directory / STAGING / f"latest-{self.name}"
        data = f"{self.step}\n".encode("ascii")
        try:
            if is_copy and self.step != list_steps(self._file_system, self._directory)[0]:
                return
            replace_small(self._file_system, path, data, draft=draft, sync=False)
        except OSError as error:
            warn("RK-842", "%s is saved, but not named in %s: %s", self.step, path, describe(error))


def _check_path(path: str, expected: str) -> None:
    problem = path_problem(path)
    if problem is not None:
        raise ConfigurationError(repr(path), found=problem, expected=expected)


def check_space(
    file_system: FileSystem, directory: Path, *, num_bytes: int, num_files: int
) -> None:
    """Checks that there is space for a checkpoint.

    Args:
        file_system: the file system.
        directory: the run directory.
        num_bytes: of all files together, the manifest aside.
        num_files: files and directories, the manifest aside.

    Raises:
        InsufficientSpaceError: names the free and the needed space.
        SaveError: the free space is unknown.
    """
    with save_errors(directory):
        free = file_system.free(directory)
    needed_bytes = num_bytes + _MANIFEST_BYTES + _BLOCK_BYTES * (num_files + 1)
    if free.num_bytes < needed_bytes:
        raise InsufficientSpaceError(
            str(directory),
            found=f"{free.num_bytes:,} bytes are free",
            expected=f"{needed_bytes:,} for the checkpoint",
            remedy=MAKE_ROOM,
        )
    if free.num_inodes is not None and free.num_inodes < num_files + 2:
        raise InsufficientSpaceError(
            str(directory),
            found=f"{free.num_inodes} more files can be made",
            expected=f"{num_files + 2} for the checkpoint",
            remedy=MAKE_ROOM,
        )


# ---------------------------------------------------------------- moved to the trash, then removed


class Trash:
    """The trash of one attempt. Rank 0 only, and one thread at a time.

    Args:
        file_system: the file system.
        directory: the run directory.
        is_in_place: whether a rename is not atomic there.
    """

    def __init__(
        self, file_system: FileSystem, directory: Path, *, is_in_place: bool = False
    ) -> None:
        self._file_system = file_system
        self._directory = directory
        self._is_in_place = is_in_place
        self._taken: list[Path] = []  # renamed, and not synced yet
        self._removable: list[Path] = []  # renamed durably
        self._unsure: set[str] = set()  # names in staging whose sync has failed

    def take(self, names: Sequence[StepName]) -> None:
        """Renames step directories away; ``empty`` makes that durable before it removes a byte.

        Raises:
            SaveError: names the path and the cause. Every checkpoint is whole or gone.
        """
        for name in names:
            with save_errors(self._directory / str(name)):
                self._taken.append(self._withdraw(name))

    def _withdraw(self, name: StepName) -> Path:
        path = self._directory / str(name)
        target = self._directory / STAGING / f"trash-{name}-{uuid.uuid4().hex[:12]}"
        if not self._is_in_place and rename_directory(self._file_system, path, target):
            return target
        mark(self._file_system, self._directory, name)
        self._file_system.unlink(path / MANIFEST)
        return path

    def sync(self) -> None:
        """Makes the renames durable. Before any other sync of the run directory, which may fail.

        Raises:
            SaveError: it failed; what was taken stays until the next attempt.
        """
        taken, self._taken = self._taken, []
        if taken:
            with save_errors(self._directory):
                self._sync({path.name for path in taken})
            self._removable += taken

    def empty(self) -> None:
        """Removes the bytes of what was taken; continues after an error.

        Raises:
            SaveError: the first failure. The next ``sweep`` removes the rest.
        """
        self.sync()
        failure: Exception | None = None
        while self._removable:
            path = self._removable.pop(0)
            try:
                with save_errors(path):
                    self._remove_tree(path)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def sweep(self, keep: Set[str]) -> None:
        """Removes everything from staging, and what is incomplete, as far as it goes.

        Args:
            keep: names in staging that are in use.
        """
        self._sweep_marked(keep)
        staging = self._directory / STAGING
        durable = {path.name for path in self._removable}
        self._removable.clear()
        self._taken.clear()
        with suppress(OSError):
            entries = self._file_system.list(staging)
            stale = [item for item in entries if item.name not in keep | self._unsure]
            others = {item.name for item in stale} - durable
            if others and not self._is_synced(others):
                stale = [item for item in stale if item.name in durable]
            for item in stale:
                with suppress(OSError):
                    self._remove(staging / item.name, item.kind)

    def _sweep_marked(self, keep: Set[str]) -> None:
        file_system, directory = self._file_system, self._directory
        with suppress(OSError):
            for name in list_marked(file_system, directory):
                if str(name) not in keep and not is_complete(file_system, directory, name):
                    with suppress(OSError):
                        remove_marked(file_system, directory, name)

    def _is_synced(self, names: Set[str]) -> bool:
        # A checkpoint that was renamed away must be gone for good before its files go.
        try:
            self._sync(names)
        except OSError:
            return False
        return True

    def _remove_tree(self, path: Path) -> None:
        name = StepName.parse(path.name)
        if name is None:
            remove_tree(self._file_system, path)
        else:
            remove_marked(self._file_system, self._directory, name)

    def _remove(self, path: Path, kind: Kind) -> None:
        if kind == "directory":
            remove_tree(self._file_system, path)
        else:
            self._file_system.unlink(path)

    def _sync(self, names: Set[str]) -> None:
        try:
            self._file_system.fsync_dir(self._directory)
        except OSError:
            self._unsure.update(names)
            raise
