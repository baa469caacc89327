"""The limits of this machine for so many bytes, as rows beside what is measured.

Nothing of resumekit is used here, so that a defect of its writer does not move the limit too.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from measuring import drop_page_cache, timed

_PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
_RAW_BLOCK_BYTES = 32 << 20  # smaller ones were slower, larger ones not faster


def huge_memory(num_bytes: int) -> memoryview:
    """Private memory in huge pages where the system has them, every page of it touched."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a shared mapping gets no huge pages
    mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE_BYTES, flags=flags)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _HUGE_PAGE_BYTES
    memory = memoryview(mapping)[begin : begin + num_bytes]
    np.frombuffer(memory, np.uint8).fill(7)
    return memory


class RawLimits:
    """What this machine takes for so many bytes: one write, one read, one copy in memory.

    The write and the read go past the page cache, from and into huge pages, in one thread; the
    write ends with an fsync. The copy goes from ordinary memory into huge pages that were used.

    Args:
        directory: where the file is written.
        num_bytes: rounded up to whole pages.
    """

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self._path = directory / "raw"
        self._memory = huge_memory(self.num_bytes)
        self._source = torch.arange(self.num_bytes // 8)
        self.is_direct = self._supports_direct_io()

    def _supports_direct_io(self) -> bool:
        try:
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
        except OSError:
            return False
        return True

    def write(self) -> float:
        """Seconds of a new file, until it is on the disk."""
        self._path.unlink(missing_ok=True)
        os.sync()
        return timed(self._write)[0]

    def _write(self) -> None:
        handle = self._open(self._path, os.O_WRONLY | os.O_CREAT)
        for begin in range(0, self.num_bytes, _RAW_BLOCK_BYTES):
            os.pwrite(handle, self._memory[begin : begin + _RAW_BLOCK_BYTES], begin)
        os.fsync(handle)
        os.close(handle)

    def read(self, folder: Path) -> float:
        """Seconds of reading the files below a folder, from the disk.

        The same files that are measured: how fast a disk reads depends on where they lie.
        """
        paths = [path for path in folder.rglob("*") if path.is_file()]
        drop_page_cache(folder, whole=False)
        return timed(lambda: self._read(paths))[0]

    def _read(self, paths: Sequence[Path]) -> None:
        for path in paths:
            handle = self._open(path, os.O_RDONLY)
            for begin in range(0, path.stat().st_size, _RAW_BLOCK_BYTES):
                os.preadv(handle, [self._memory[begin : begin + _RAW_BLOCK_BYTES]], begin)
            os.close(handle)

    def _open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | (os.O_DIRECT if self.is_direct else 0))

    def copy(self) -> float:
        """Seconds of one copy in memory, by torch or by numpy, whichever is faster now."""
        target = torch.frombuffer(self._memory, dtype=torch.int64)
        array, source = target.numpy(), self._source.numpy()
        by_torch = timed(lambda: target.copy_(self._source))[0]
        return min(by_torch, timed(lambda: np.copyto(array, source))[0])

    def __str__(self) -> str:
        flag = "O_DIRECT" if self.is_direct else "buffered: no O_DIRECT here"
        return f"{flag}, {self.num_bytes / 1e9:.2f} GB"
