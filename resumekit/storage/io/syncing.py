"""Files and directories that are made durable together: one wait for the disk in place of many.

Each sync waits until the disk has emptied its cache, and on a journaling file system for a commit
of the journal. Syncs that wait at the same time share both.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

from resumekit.storage.io.file_system import FileSystem, LocalFileSystem, save_errors
from resumekit.storage.io.pipeline import make_at_once


class UnsyncedFiles(AbstractContextManager["UnsyncedFiles"]):
    """Complete files that are still open. As a context manager it syncs them, or closes them.

    No sync is repeated: after a failed one the file is closed.

    Args:
        file_system: the file system. Others than the local one are called in order, one by one.
    """

    def __init__(self, file_system: FileSystem) -> None:
        self._file_system = file_system
        self._files: dict[int, Path] = {}

    def add(self, handle: int, path: Path) -> None:
        """Takes over an open file, to which nothing will be written."""
        self._files[handle] = path

    def sync(self, directories: Iterable[Path] = ()) -> None:
        """All files and these directories survive a power cut once this returns.

        They are synced in no order.

        Raises:
            SaveError: names the first file or directory that failed.
        """
        files = [partial(self._sync_file, handle) for handle in self._files]
        calls = [*files, *(partial(self._sync_directory, path) for path in directories)]
        try:
            if isinstance(self._file_system, LocalFileSystem):
                make_at_once(calls)
            else:
                for call in calls:
                    call()
        finally:
            self.discard()

    def discard(self) -> None:
        """Closes the files; nothing is known about their bytes on the disk."""
        for handle in list(self._files):
            del self._files[handle]
            with suppress(OSError):  # the caller raises the first error
                self._file_system.close(handle)

    def _sync_file(self, handle: int) -> None:
        with save_errors(self._files[handle]):
            self._file_system.fsync(handle)
            del self._files[handle]
            self._file_system.close(handle)

    def _sync_directory(self, path: Path) -> None:
        with save_errors(path):
            self._file_system.fsync_dir(path)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.sync()
        else:
            self.discard()
