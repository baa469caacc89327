"""Direct I/O: large aligned memory is written and read without a copy in the page cache.

O_DIRECT needs the offset, the length and the address in memory to be multiples of the block size of
the device; 4096 suffices everywhere (open(2), NOTES).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resumekit.log import logger


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library of this process, for calls that Python does not have."""
    return ctypes.CDLL(None, use_errno=True)


def address_of(memory: memoryview) -> int:
    """Where writable memory begins, in this process's address space."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory.nbytes else 0


ALIGNED_BYTES = 4096
MIN_DIRECT_BYTES = 1 << 20  # below it, a write into the page cache returns sooner
_JUDGED_BYTES = 64 << 20  # read the same way; to ask for each block costs a tenth of a fast disk
_MAX_BUFFERS = 1024  # IOV_MAX of Linux; longer lists are refused by writev

FUSE = 0x65735546

# linux/magic.h: memory, and servers to which each direct request would be a round trip.
_ALWAYS_BUFFERED = {
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    FUSE: "FUSE",
    0x6969: "NFS",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x01021997: "9P",
}
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)  # macOS has none


@dataclass
class _File:
    """An open file.

    Attributes:
        path: of the file.
        device: of its file system.
        size: bytes that were written so far.
        is_direct: whether its descriptor has O_DIRECT set now.
        cached: by part of ``_JUDGED_BYTES``, whether its first read found the page cache filled.
    """

    path: Path
    device: int
    size: int = 0
    is_direct: bool = False
    cached: dict[int, bool] = field(default_factory=dict)


class DirectIO:
    """Writes and reads of open files, direct ones wherever the file system supports them.

    A file system is judged once, by its type and by the first direct call.
    """

    def __init__(self) -> None:
        self._files: dict[int, _File] = {}
        self._direct_reads: dict[int, int] = {}  # a second descriptor of the same file
        self._supported: dict[int, bool] = {}  # by device

    def opened(self, descriptor: int, path: Path) -> None:
        """Takes note of a file that was created or opened for reading."""
        self._files[descriptor] = _File(path, os.fstat(descriptor).st_dev)

    def path_of(self, descriptor: int) -> Path:
        """The path by which a file was opened."""
        return self._files[descriptor].path

    def closing(self, descriptor: int) -> None:
        """Forgets a file; called before its descriptor is closed."""
        self._files.pop(descriptor, None)
        second = self._direct_reads.pop(descriptor, None)
        if second is not None:
            os.close(second)

    def is_direct(self, descriptor: int) -> bool:
        """Whether the bytes that were written last bypassed the page cache."""
        file = self._files.get(descriptor)
        return file is not None and file.is_direct

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        """Appends the front of the buffers; returns how many bytes.

        Args:
            descriptor: a file that was created, or any other one that takes bytes.
            buffers: flat and not empty.
        """
        file = self._files.get(descriptor)
        if file is None:
            return os.writev(descriptor, buffers[:_MAX_BUFFERS])
        aligned = buffers[0][: _aligned_bytes(buffers[0], file.size)]
        direct = aligned.nbytes >= MIN_DIRECT_BYTES and self._switch(descriptor, file)
        try:
            if direct:
                written = os.writev(descriptor, [aligned])
            else:
                self._switch_off(descriptor, file)
                written = os.writev(descriptor, buffers[:_MAX_BUFFERS])
        except OSError as error:
            if not (direct and error.errno == errno.EINVAL):
                raise
            self._decide(file, False, describe="refuses direct writes")
            return self.write(descriptor, buffers)
        file.size += written
        return written

    def read(self, descriptor: int, offset: int, buffer: memoryview) -> int:
        """Reads into the front of the buffer; returns how many bytes, 0 at the end of the file.

        Bytes in the page cache are copied from there; others are read directly.
        """
        file = self._files.get(descriptor)
        aligned = buffer[: _aligned_bytes(buffer, offset)]
        if file is None or aligned.nbytes < MIN_DIRECT_BYTES or not self._is_supported(file):
            return os.preadv(descriptor, [buffer], offset)
        part = offset // _JUDGED_BYTES
        if part not in file.cached:
            file.cached[part] = _is_cached(descriptor, offset, aligned.nbytes)
        if file.cached[part]:
            return os.preadv(descriptor, [buffer], offset)
        try:
            return os.preadv(self._for_direct_reads(descriptor), [aligned], offset)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOENT):  # ENOENT: /proc is not mounted
                raise
            self._decide(file, False, describe="refuses direct reads")
            return os.preadv(descriptor, [buffer], offset)

    def _for_direct_reads(self, descriptor: int) -> int:
        if descriptor not in self._direct_reads:
            # The same file, whatever its name means by now.
            flags = os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT
            opened = os.open(f"/proc/self/fd/{descriptor}", flags)
            if self._direct_reads.setdefault(descriptor, opened) != opened:
                os.close(opened)  # another thread was first
        return self._direct_reads[descriptor]

    def _switch(self, descriptor: int, file: _File) -> bool:
        """Sets O_DIRECT if the file system supports it; returns whether it does."""
        if not self._is_supported(file):
            return False
        if not file.is_direct:
            try:
                flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
                fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _O_DIRECT)
            except OSError:
                self._decide(file, False, describe="has no direct I/O")
                return False
            file.is_direct = True
        return True

    def _switch_off(self, descriptor: int, file: _File) -> None:
        if file.is_direct:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
            file.is_direct = False

    def _is_supported(self, file: _File) -> bool:
        if file.device not in self._supported:
            kind = _ALWAYS_BUFFERED.get(type_of_file_system(file.path))
            if not _O_DIRECT:
                self._decide(file, False, describe="is on a system without O_DIRECT")
            elif kind is not None:
                self._decide(file, False, describe=f"is on {kind}")
            else:
                self._decide(file, True, describe="supports O_DIRECT")
        return self._supported[file.device]

    def _decide(self, file: _File, supported: bool, *, describe: str) -> None:
        self._supported[file.device] = supported
        kind = "direct" if supported else "buffered"
        logger.debug("%s: %s, using %s I/O for large files", file.path.parent, describe, kind)


def _aligned_bytes(buffer: memoryview, offset: int) -> int:
    """How many bytes at the front of a buffer can be transferred directly at this offset."""
    if buffer.nbytes < MIN_DIRECT_BYTES or offset % ALIGNED_BYTES or not is_aligned(buffer):
        return 0
    return buffer.nbytes - buffer.nbytes % ALIGNED_BYTES


def is_aligned(memory: memoryview) -> bool:
    """Whether this is writable memory that begins at a multiple of 4096."""
    return not memory.readonly and address_of(memory) % ALIGNED_BYTES == 0


def _is_cached(descriptor: int, offset: int, num_bytes: int) -> bool:
    """Whether most of these bytes of a file are in the page cache."""
    # Not RWF_NOWAIT: a read with it fails, but starts to read the file into the page cache.
    num_bytes = min(num_bytes, os.fstat(descriptor).st_size - offset)
    if num_bytes <= 0:
        return True
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    with mmap.mmap(descriptor, num_bytes, offset=offset, access=mmap.ACCESS_COPY) as mapped:
        address = ctypes.c_void_p(address_of(memoryview(mapped)))
        failed = libc().mincore(address, ctypes.c_size_t(num_bytes), pages)
    # Only the lowest bit has a meaning, and the others are not set (mincore(2)).
    return not failed and 2 * bytes(pages).count(1) >= len(pages)


def type_of_file_system(path: Path) -> int:
    """``f_type`` of statfs(2); 0 where there is none."""
    if not sys.platform.startswith("linux"):
        return 0
    status = (ctypes.c_long * 64)()  # more than struct statfs needs; f_type is its first field
    failed = libc().statfs(os.fsencode(path), ctypes.byref(status))
    return 0 if failed else status[0]
