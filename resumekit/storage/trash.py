"""Deleted checkpoints and left-over staging directories: renamed away first, removed later.

A deleted checkpoint is renamed into ``.staging`` at once. Its bytes go later, and only when the
rename is durable: otherwise a power cut could restore the name of half a checkpoint. Before that it
restores a whole one, so only the removal of the bytes waits for the sync. Where the sync failed,
nothing proves that the rename ever will be durable, as a failed sync is never retried: that
checkpoint stays in ``.staging`` until the next attempt.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path

from resumekit.storage.directories import STAGING, StepName, remove_tree
from resumekit.storage.io.file_system import FileSystem, Kind, save_errors


class Trash:
    """The trash of one attempt. Rank 0 only, and one thread at a time.

    Args:
        file_system: the file system.
        directory: the run directory.
    """

    def __init__(self, file_system: FileSystem, directory: Path) -> None:
        self._file_system = file_system
        self._directory = directory
        self._taken: list[Path] = []  # renamed, and not synced yet
        self._removable: list[Path] = []  # renamed durably
        self._unsure: set[str] = set()  # names in staging whose sync has failed

    def take(self, names: Sequence[StepName]) -> None:
        """Renames step directories away; ``empty`` makes that durable before it removes a byte.

        Raises:
            SaveError: names the path and the cause. Every checkpoint is whole or gone.
        """
        for name in names:
            target = self._directory / STAGING / f"trash-{name}-{uuid.uuid4().hex[:12]}"
            with save_errors(self._directory / str(name)):
                self._file_system.rename(self._directory / str(name), target)
            self._taken.append(target)

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
                    remove_tree(self._file_system, path)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def sweep(self, keep: Set[str]) -> None:
        """Removes everything from staging, as far as it goes.

        Args:
            keep: names in staging that are in use.
        """
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

    def _is_synced(self, names: Set[str]) -> bool:
        # A checkpoint that was renamed away must be gone for good before its files go.
        try:
            self._sync(names)
        except OSError:
            return False
        return True

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
