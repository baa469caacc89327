"""Host memory for direct I/O and for copies of the state: aligned, in huge pages, not inherited.

Writing or reading with O_DIRECT is about twice as fast to and from huge pages as with pages of
4 KiB: the kernel pins each page of the memory for each request.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from contextlib import suppress

ALIGNMENT = 2 << 20  # bytes of a huge page on x86-64, and on arm64 with 4 KiB pages
MIN_HUGE_BYTES = 1 << 20  # smaller allocations come from memory that is in use again and again
_PAGE_BYTES = 4096
_POPULATE_WRITE = 23  # linux/mman.h MADV_POPULATE_WRITE, since Linux 5.14
_POPULATED_BYTES = 32 << 20  # at a time: mmap.madvise holds the interpreter's lock


class HostBuffer:
    """Private anonymous memory of this process, aligned to 2 MiB, in huge pages where there are.

    It begins as zeros, and takes up memory only where it was touched. A forked child does not have
    it (MADV_DONTFORK): neither does a fork copy its page tables, nor does a page that is being read
    into get a second owner. A child that touches ``view`` is killed by SIGSEGV, so code that keeps
    a buffer drops it in ``os.register_at_fork(after_in_child=...)``.

    Args:
        num_bytes: the size of ``view``.

    Raises:
        OSError: ENOMEM, the system grants no such mapping.
    """

    def __init__(self, num_bytes: int) -> None:
        # Not mmap(-1, n) alone: that is a shared mapping, which gets no huge pages.
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT + ALIGNMENT
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with suppress(OSError, AttributeError):  # a kernel, or a system, without it
                self._map.madvise(getattr(mmap, name))
        self._start = -address_of(memoryview(self._map)) % ALIGNMENT
        self.num_bytes = num_bytes
        self.view = memoryview(self._map)[self._start : self._start + num_bytes]

    def touch(self) -> None:
        """Faults all pages in, in place of the first use of each; keeps what they hold."""
        try:
            for begin in range(0, self.num_bytes, _POPULATED_BYTES):
                length = min(_POPULATED_BYTES, self.num_bytes - begin)
                self._map.madvise(_POPULATE_WRITE, self._start + begin, length)
        except (OSError, AttributeError):
            self.view[::_PAGE_BYTES] = self.view[::_PAGE_BYTES].tobytes()

    def release(self) -> None:
        """Gives the memory back: now, or with the last slice of ``view`` that is still in use."""
        self.view.release()
        with suppress(BufferError):
            self._map.close()


def use_huge_pages(memory: memoryview) -> None:
    """Backs memory that is not touched yet with huge pages, where the system has them.

    Faulting in fresh pages of 4 KiB takes several times as long as a copy into them.

    Args:
        memory: writable; small memory is left as it is.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or memory.nbytes < MIN_HUGE_BYTES:
        return
    # Rounded outwards: allocations side by side then share huge pages. The owner of the rest of a
    # page does not notice: only faults to come are affected.
    address = address_of(memory)
    begin = address - address % mmap.PAGESIZE
    length = address - begin + memory.nbytes
    # A kernel without huge pages refuses; the memory is as good as before.
    libc().madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), advice)


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library of this process, for calls that Python does not have."""
    return ctypes.CDLL(None, use_errno=True)


def address_of(memory: memoryview) -> int:
    """Where writable memory begins, in this process's address space."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if memory.nbytes else 0
