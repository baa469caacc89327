"""The seam over a disk in memory, writing down every call that changes the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from crashlab.disk import DirectoryNode, Disk, FileNode
from crashlab.operations import (
    Append,
    FailedSync,
    Link,
    Move,
    Operation,
    Sync,
    SyncDirectory,
    Unlink,
)
from resumekit.storage.io.direct import _aligned_bytes
from resumekit.storage.io.file_system import Entry, Free, ReadHandle

RUN = Path("/data/runs/a")


@dataclass
class Recording:
    """A disk before, and every call on it since, by all ranks of a job.

    Calls of different ranks between the same two barriers are concurrent.
    """

    before: Disk
    disk: Disk
    operations: list[Operation] = field(default_factory=list)
    phase: int = 0

    @classmethod
    def on(cls, disk: Disk) -> Recording:
        """A recording that starts on a copy of this disk, all of it durable."""
        return cls(before=disk.copy(), disk=disk.copy())

    def restart(self) -> None:
        """Forgets the calls; the disk as it is now is durable."""
        self.before = self.disk.copy()
        self.operations.clear()
        self.phase = 0

    def barrier(self) -> None:
        """All ranks have done what was recorded so far before any does what follows."""
        self.phase += 1


class RecordingFileSystem:
    """One rank's view of a recording; implements ``FileSystem`` of ``resumekit.storage``."""

    def __init__(self, recording: Recording, rank: int = 0) -> None:
        self._recording = recording
        self._disk = recording.disk
        self._rank = rank
        self._open: dict[int, tuple[int, Path]] = {}
        self._next_handle = 3

    def mkdir(self, path: Path) -> None:
        self._link(path, DirectoryNode(), f"mkdir {path}")

    def create(self, path: Path) -> int:
        number = self._link(path, FileNode(), f"create {path}")
        self._next_handle += 1
        self._open[self._next_handle] = (number, path)
        return self._next_handle

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        number, path = self._open[handle]
        node = self._disk.file(number)
        for kind, parts in _system_calls(buffers, len(node.data)):
            data = b"".join(parts)
            node.data += data
            call = f"{kind} {path} {len(data)} bytes"
            self._record(Append(*self._by(call), file=number, data=data))

    def writeback(self, handle: int, offset: int, length: int) -> None:
        del handle, offset, length  # promises nothing, so a crash may lose it all the same

    def fsync(self, handle: int) -> None:
        number, path = self._open[handle]
        self._record(Sync(*self._by(f"fsync {path}"), file=number))

    def close(self, handle: int | ReadHandle) -> None:
        if isinstance(handle, int):
            del self._open[handle]

    def fsync_dir(self, path: Path) -> None:
        number = self._disk.find_directory(path)
        self._record(SyncDirectory(*self._by(f"fsync_dir {path}"), directory=number))

    def fail_sync(self, target: int | Path) -> NoReturn:
        """Stands for ``fsync`` of a handle, or ``fsync_dir`` of a path, that fails."""
        number, path = (
            self._open[target]
            if isinstance(target, int)
            else (self._disk.find_directory(target), target)
        )
        self._record(FailedSync(*self._by(f"failing fsync of {path}"), inode=number))
        raise _error(errno.EIO, path)

    def rename(self, source: Path, target: Path) -> None:
        old, new = self._parent(source), self._parent(target)
        child = self._disk.find(source)
        there = self._disk.directory(new).entries.get(target.name)
        if there is not None and not self._may_replace(child, there):
            raise _error(errno.EEXIST, target)
        del self._disk.directory(old).entries[source.name]
        self._disk.directory(new).entries[target.name] = child
        by = self._by(f"rename {source} {target}")
        self._record(Move(*by, old, source.name, new, target.name, child))

    def link(self, source: Path, target: Path) -> None:
        parent, child = self._parent(target), self._disk.find(source)
        if target.name in self._disk.directory(parent).entries:
            raise _error(errno.EEXIST, target)
        self._disk.file(child)
        self._disk.directory(parent).entries[target.name] = child
        by = self._by(f"link {source} {target}")
        self._record(Link(*by, parent, target.name, child, is_new=False))

    def unlink(self, path: Path) -> None:
        self._unlink(path, f"unlink {path}", FileNode, errno.EISDIR)

    def rmdir(self, path: Path) -> None:
        number = self._disk.find_directory(path)
        if self._disk.directory(number).entries:
            raise _error(errno.ENOTEMPTY, path)
        self._unlink(path, f"rmdir {path}", DirectoryNode, errno.ENOTDIR)

    def list(self, path: Path) -> list[Entry]:
        entries = self._disk.directory(self._disk.find_directory(path)).entries
        return [self._entry(name, entries[name]) for name in sorted(entries)]

    def entry(self, path: Path) -> Entry:
        return self._entry(path.name, self._disk.find(path))

    def open(self, path: Path) -> ReadHandle:
        number = self._disk.find(path)
        node = self._disk.nodes[number]
        if not isinstance(node, FileNode):
            raise _error(errno.EISDIR, path)
        return ReadHandle(number, len(node.data))

    def read_into(self, handle: ReadHandle, offset: int, buffer: memoryview) -> int:
        data = self._disk.file(handle.number).data[offset : offset + buffer.nbytes]
        buffer[: len(data)] = data
        return len(data)

    def advise_sequential(self, handle: ReadHandle) -> None:
        del handle

    def free(self, path: Path) -> Free:
        self._disk.find(path)
        return Free(num_bytes=1 << 40, num_inodes=1 << 20)

    def has_atomic_rename(self, path: Path) -> bool:
        del path
        return True

    def _by(self, call: str) -> tuple[int, int, str]:
        return self._rank, self._recording.phase, call

    def _record(self, operation: Operation) -> None:
        self._recording.operations.append(operation)

    def _parent(self, path: Path) -> int:
        return self._disk.find_directory(path.parent)

    def _may_replace(self, child: int, there: int) -> bool:
        return all(isinstance(self._disk.nodes[number], FileNode) for number in (child, there))

    def _link(self, path: Path, node: FileNode | DirectoryNode, call: str) -> int:
        parent = self._parent(path)
        entries = self._disk.directory(parent).entries
        if path.name in entries:
            raise _error(errno.EEXIST, path)
        entries[path.name] = child = self._disk.add(node)
        by = self._by(call)
        self._record(Link(*by, parent, path.name, child, isinstance(node, DirectoryNode)))
        return child

    def _unlink(self, path: Path, call: str, kind: type, wrong_kind: int) -> None:
        parent = self._parent(path)
        child = self._disk.find(path)
        if not isinstance(self._disk.nodes[child], kind):
            raise _error(wrong_kind, path)
        del self._disk.directory(parent).entries[path.name]
        self._record(Unlink(*self._by(call), parent, path.name, child))

    def _entry(self, name: str, number: int) -> Entry:
        node = self._disk.nodes[number]
        if isinstance(node, FileNode):
            return Entry(name, "file", len(node.data))
        return Entry(name, "directory", 0)


def _system_calls(
    buffers: Sequence[memoryview], offset: int
) -> Iterator[tuple[str, Sequence[memoryview]]]:
    """The system calls by which ``LocalFileSystem`` appends these buffers, and their bytes."""
    pending = [buffer for buffer in buffers if buffer.nbytes]
    while pending:
        first = pending[0]
        num_direct = _aligned_bytes(first, offset)
        yield ("direct write", [first[:num_direct]]) if num_direct else ("write", pending)
        if not num_direct:
            return
        offset += num_direct
        pending[:1] = [first[num_direct:]] if num_direct < first.nbytes else []


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
