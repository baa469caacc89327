"""Frozen tensors of a job: the product's files and links, on a disk in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from crashlab.disk import Disk
from crashlab.recording import RUN, Recording, RecordingFileSystem
from resumekit.run.saving.payloads import FrozenLinks
from resumekit.serialization.leaves import bytes_leaf
from resumekit.serialization.writing import FrozenFiles
from resumekit.storage.commit import Staging
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileEntry
from resumekit.storage.ownership import NoLock
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

_NUM_BYTES = 5000


@dataclass
class FrozenTensors:
    """The frozen tensors of all ranks of one launch.

    Args:
        policy: the retention policy of the job.
        world_size: how many ranks.
        changed_at: steps from which on the tensors have other values.
        links_class: what chooses the files to link to; the mutant, if it is that.
        files_class: what compares and writes; the mutant, if it is that.
    """

    policy: RetentionPolicy
    world_size: int
    changed_at: Collection[int] = ()
    links_class: type[FrozenLinks] = FrozenLinks
    files_class: type[FrozenFiles] = FrozenFiles
    _links: list[FrozenLinks] = field(init=False)

    def __post_init__(self) -> None:
        self._links = [self.links_class(self.policy) for _ in range(self.world_size)]

    def content(self, name: StepName) -> dict[str, bytes]:
        """What the files of all ranks hold in this checkpoint."""
        found: dict[str, bytes] = {}
        for rank in range(self.world_size):
            found |= _content(self._version(name), rank)
        return found

    def write(self, name: StepName, staging: Staging, rank: int) -> list[FileEntry]:
        """Writes the files of one rank, or links them."""
        payload = _files(self.files_class, self._version(name), rank)
        with self._links[rank].compared(name.step, [payload], num_threads=1):
            return payload.write(staging)

    def committed(self, name: StepName, entries: Iterable[FileEntry]) -> None:
        """The checkpoint with these files is durable."""
        entries = list(entries)
        for rank, links in enumerate(self._links):
            links.committed(name, [entry for entry in entries if entry.writer == rank])

    def _version(self, name: StepName) -> int:
        return sum(step <= name.step for step in self.changed_at)


def _files(files_class: type[FrozenFiles], version: int, rank: int) -> FrozenFiles:
    data = hashlib.shake_256(f"{version} {rank}".encode()).digest(_NUM_BYTES)
    return files_class("model", rank, {"weight": bytes_leaf(data)})


@lru_cache
def _content(version: int, rank: int) -> dict[str, bytes]:
    disk = Disk()
    disk.make_directories(RUN.parent)
    recording = Recording.on(disk)
    store = Store(RUN, file_system=RecordingFileSystem(recording), lock=NoLock())
    store.acquire()
    staging = store.stage(StepName(1), num_bytes=1, num_files=1, directories=["model"])
    entries = _files(FrozenFiles, version, rank).write(staging)
    disk = recording.disk
    return {entry.path: disk.file(disk.find(staging.path / entry.path)).data for entry in entries}
