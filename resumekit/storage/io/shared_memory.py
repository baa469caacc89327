"""Files in shared memory, whose pages are used again.

To write fresh pages takes several times as long as to copy into pages that are there and mapped. So
a large file that is removed stays, under another name, until one of the same name is created: that
one takes its pages. A file is only written again once it has been removed from its checkpoint.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from resumekit.storage.io.direct import address_of
from resumekit.storage.io.file_system import Free, LocalFileSystem, ReadHandle

_MIN_BYTES = 1 << 20  # smaller files are written as they are everywhere
_NUM_KEPT = 2  # of one name: that of the newest checkpoint, and the one that is written next


@dataclass
class _Mapped:
    """A file of this process.

    Attributes:
        inode: of it.
        view: its bytes.
        num_written: of them, since it was created the last time.
    """

    inode: int
    view: memoryview
    num_written: int = 0

    def append(self, buffer: memoryview) -> memoryview:
        """Copies what has room; gives the rest."""
        target = self.view[self.num_written : self.num_written + buffer.nbytes]
        source = buffer[: target.nbytes]
        if source.readonly or source.nbytes < _MIN_BYTES:
            target[:] = source
        else:  # without the interpreter's lock
            ctypes.memmove(address_of(target), address_of(source), source.nbytes)
        self.num_written += source.nbytes
        return buffer[source.nbytes :]


class SharedMemoryFileSystem(LocalFileSystem):
    """The calls on a directory in shared memory.

    Args:
        spare: a directory for removed files, the same for all ranks.
    """

    def __init__(self, spare: Path) -> None:
        super().__init__()
        self._spare = spare
        self._mapped: dict[tuple[str, ...], list[_Mapped]] = {}  # by folder and name
        self._created: dict[int, tuple[Path, _Mapped | None]] = {}  # by handle

    def create(self, path: Path) -> int:
        """A file that takes the pages of a removed one, where there is one of this name."""
        for mapped in self._mapped.get(path.parts[-2:], ()):
            with suppress(FileNotFoundError):
                spare = self._spare / str(mapped.inode)
                os.link(spare, path)  # not a rename: the path must not exist
                os.unlink(spare)
                mapped.num_written = 0
                descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                self._created[descriptor] = path, mapped
                return descriptor
        descriptor = super().create(path)
        self._created[descriptor] = path, None
        return descriptor

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        _, mapped = self._created.get(handle, (None, None))
        if mapped is not None:
            rest = [mapped.append(buffer) for buffer in buffers]
            buffers = [buffer for buffer in rest if buffer.nbytes]
            if buffers:
                os.lseek(handle, 0, os.SEEK_END)
        super().write(handle, buffers)

    def close(self, handle: int | ReadHandle) -> None:
        if isinstance(handle, int):
            path, mapped = self._created.pop(handle, (None, None))
            if mapped is not None and mapped.num_written < mapped.view.nbytes:
                os.ftruncate(handle, mapped.num_written)
                mapped.view = mapped.view[: mapped.num_written]
            status = os.fstat(handle)
            if path is not None and status.st_size >= _MIN_BYTES:
                self._keep(path, status)
        super().close(handle)

    def _keep(self, path: Path, status: os.stat_result) -> None:
        """Maps a file for the time when it is written again."""
        kept = self._mapped.setdefault(path.parts[-2:], [])
        known = next((each for each in kept if each.inode == status.st_ino), None)
        if known is not None and known.view.nbytes == status.st_size:
            return
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        view = memoryview(mmap.mmap(descriptor, status.st_size))
        os.close(descriptor)
        others = [each for each in kept if each is not known]
        kept[:] = [*others, _Mapped(status.st_ino, view)][-_NUM_KEPT:]

    def unlink(self, path: Path) -> None:
        """Removes a name; a large file stays as a spare one."""
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and status.st_size >= _MIN_BYTES:
            os.rename(path, self._spare / str(status.st_ino))
        else:
            super().unlink(path)

    def remove_spare(self) -> None:
        """Removes the spare files that nobody has taken."""
        for entry in self.list(self._spare):
            os.unlink(self._spare / entry.name)

    def free(self, path: Path) -> Free:
        found, spare = super().free(path), self.list(self._spare)
        return replace(found, num_bytes=found.num_bytes + sum(entry.size for entry in spare))
