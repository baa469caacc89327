"""Copies in another directory, which is written as a run directory is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from resumekit.errors import CheckpointError, ForeignCheckpointError
from resumekit.storage.commit import Staging
from resumekit.storage.committed import list_steps
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import LocalFileSystem, Observer
from resumekit.storage.manifest import Manifest, StepReader
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store


class DirectoryCopies:
    """The copies in a directory; it is owned only while one is written.

    Args:
        directory: an absolute path.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> list[StepName]:
        try:
            return list_steps(LocalFileSystem(), self._directory)
        except FileNotFoundError:
            return []

    def manifest(self, name: StepName) -> Manifest:
        return self._reader(name).manifest

    def blocks(self, name: StepName, entry: FileEntry) -> Iterator[memoryview]:
        return self._reader(name).blocks(entry)

    def put(self, source: StepReader, retention: RetentionPolicy, observer: Observer) -> None:
        manifest, names = source.manifest, self.names()
        if source.name in names:
            check_same(self.manifest(source.name), manifest, self._directory)
            return
        previous = self._previous(names)

        def write(staging: Staging, entry: FileEntry) -> None:
            if previous is not None and entry in previous.manifest.files:
                with suppress(CheckpointError), previous.file(entry.path) as reader:
                    reader.verify()
                    if staging.link(entry.path, previous.name):
                        return
            staging.copy(entry, observed(source.blocks(entry), observer))

        store = Store(self._directory)
        store.acquire(run_id=manifest.run_id)
        try:
            store.commit_copy(manifest, write)
            store.retain(retention)
            store.empty_trash()
        finally:
            store.release()

    def _reader(self, name: StepName) -> StepReader:
        return StepReader(LocalFileSystem(), self._directory, name)

    def _previous(self, names: list[StepName]) -> StepReader | None:
        with suppress(CheckpointError):
            return self._reader(names[0]) if names else None
        return None


def check_same(there: Manifest, manifest: Manifest, where: object) -> None:
    """Checks that a copy of this name is a copy of this checkpoint.

    Raises:
        ForeignCheckpointError: it is another one.
    """
    if there != manifest:
        raise ForeignCheckpointError(
            f"{where}/{manifest.name}",
            found=f"another checkpoint of run {there.run_id}, attempt {there.attempt}",
            expected=f"that of run {manifest.run_id}, attempt {manifest.attempt}",
            remedy="Keep the copies of each run in a place of their own",
        )


def observed(blocks: Iterator[memoryview], observer: Observer) -> Iterator[memoryview]:
    """The same blocks; the observer takes the number of bytes of each."""
    for block in blocks:
        observer(block.nbytes)
        yield block
