"""Threads that overlap I/O with other work, their memory, and files that are synced together.

The ring, the thread that writes and those that sync exist once in a process, are made on first use,
and are replaced in a forked child, which has neither the threads nor the memory.

Writing or reading with O_DIRECT is about twice as fast to and from huge pages as with pages of
4 KiB: the kernel pins each page of the memory for each request.

Each sync waits until the disk has emptied its cache, and on a journaling file system for a commit
of the journal. Syncs that wait at the same time share both.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, TypeVar

from resumekit.storage.io.direct import address_of, libc
from resumekit.storage.io.file_system import FileSystem, LocalFileSystem, save_errors
from resumekit.storage.io.shared_memory import SharedMemoryFileSystem

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


# ---------------------------------------------------------------- threads

_MAX_THREADS = 4  # so many keep the memory of one socket busy

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def num_threads(ranks_on_node: int) -> int:
    """How many threads one rank uses: its part of the cores, at least 1 and at most 4.

    Args:
        ranks_on_node: how many ranks work at the same time.
    """
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        num_cores = len(os.sched_getaffinity(0))
    else:
        num_cores = os.cpu_count() or 1
    return max(1, min(_MAX_THREADS, num_cores // ranks_on_node))


class ThreadedCalls(Generic[_Item, _Result]):
    """Calls that a few threads make while the caller continues.

    The threads start with the calls and end with them: there is nothing that a fork or the exit of
    the process could find. Each takes the next item when it is done with one, so a thread on a busy
    core delays the others by one call at most.

    Args:
        call: made once for each item, in any order.
        items: of the calls.
        num_threads: how many threads are started.
    """

    def __init__(
        self, call: Callable[[_Item], _Result], items: Sequence[_Item], *, num_threads: int
    ) -> None:
        self._call = call
        self._items = items
        self._numbers = itertools.count()  # next() of it is atomic
        self._results: dict[int, _Result] = {}
        self._error: BaseException | None = None
        self._is_stopped = False
        self._threads: list[threading.Thread] = []
        for _ in range(min(num_threads, len(items))):
            thread = threading.Thread(target=self._work, name="resumekit-memory", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the interpreter is shutting down, or has too many threads
                break
            self._threads.append(thread)

    def results(self) -> list[_Result]:
        """The results in the order of the items. The caller's thread makes the calls that are left.

        Raises:
            BaseException: what a call has raised.
        """
        try:
            self._work()
        except BaseException:  # an interrupt
            self._is_stopped = True
            raise
        finally:
            self._join()
        if self._error is not None:
            raise self._error
        return [self._results[number] for number in range(len(self._items))]

    def stop(self) -> None:
        """Makes no further call; what they work on may be changed or released once this returns."""
        self._is_stopped = True
        self._join()

    def _work(self) -> None:
        for number in self._numbers:
            if number >= len(self._items) or self._is_stopped:
                return
            try:
                self._results[number] = self._call(self._items[number])
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                self._error = error
                self._is_stopped = True

    def _join(self) -> None:
        interrupted: KeyboardInterrupt | None = None
        while self._threads:
            try:
                self._threads[-1].join()
                self._threads.pop()
            except KeyboardInterrupt as interrupt:  # the memory is still in use
                self._is_stopped = True
                interrupted = interrupt
        if interrupted is not None:
            raise interrupted


# ---------------------------------------------------------------- file I/O in a ring of buffers

# Writes of 8 MiB reach a fast disk's limit; 4 MiB take 5% longer, more than 8 MiB gains nothing.
CHUNK_BYTES = 8 << 20
_NUM_CHUNKS = 3
# More than cores: some of them wait for the disk, or for a core that training's processes have.
_NUM_THREADS = 4

_NUM_SYNCS = 8  # at the same time


class Ring:
    """Aligned buffers of ``CHUNK_BYTES``, kept for the life of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer: HostBuffer | None = None

    @contextmanager
    def lent(self) -> Iterator[list[memoryview]]:
        """The buffers, or temporary ones while another caller has them.

        Raises:
            OSError: ENOMEM.
        """
        is_mine = self._lock.acquire(blocking=False)
        try:
            buffer = self._kept() if is_mine else HostBuffer(_NUM_CHUNKS * CHUNK_BYTES)
            view = buffer.view
            yield [view[at : at + CHUNK_BYTES] for at in range(0, view.nbytes, CHUNK_BYTES)]
        finally:
            if is_mine:
                self._lock.release()

    def _kept(self) -> HostBuffer:
        if self._buffer is None or self._buffer.num_bytes != _NUM_CHUNKS * CHUNK_BYTES:
            self._buffer = HostBuffer(_NUM_CHUNKS * CHUNK_BYTES)
        return self._buffer


class Slots(AbstractContextManager["Slots"]):
    """A few threads, each with aligned memory, of the process's ring, to itself.

    While one thread waits for the disk, the others digest, copy and touch fresh pages: one core
    alone does that more slowly than a disk delivers.

    Args:
        num_bytes: of the memory of each, up to ``CHUNK_BYTES``; the smaller, the more threads.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._stack = ExitStack()
        self._free: SimpleQueue[memoryview] = SimpleQueue()

    def __enter__(self) -> Slots:
        with self._stack as stack:
            memories = stack.enter_context(ring.lent())
            slots = list(islice(_pieces(memories, self._num_bytes), _NUM_THREADS))
            for slot in slots:
                self._free.put(slot)
            self._pool = stack.enter_context(
                ThreadPoolExecutor(len(slots), thread_name_prefix="resumekit-read")
            )
            self._stack = stack.pop_all()
        return self

    def map(
        self, call: Callable[[_Item, memoryview], _Result], items: Iterable[_Item]
    ) -> Iterator[_Result]:
        """The results of these calls, in order; each has a slot to itself."""

        def with_slot(item: _Item) -> _Result:
            slot = self._free.get()
            try:
                return call(item, slot)
            finally:
                self._free.put(slot)

        return self._pool.map(with_slot, items)

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _pieces(memories: Iterable[memoryview], num_bytes: int) -> Iterator[memoryview]:
    """Slices of this size, none of which overlaps another."""
    for memory in memories:
        for begin in range(0, memory.nbytes - num_bytes + 1, num_bytes):
            yield memory[begin : begin + num_bytes]


class Calls:
    """Calls on one file, made in order by a thread of the process while the caller works on.

    After the first one that raises, none of the later ones is made. As a context manager it leaves
    no call behind: whatever they work on may be reused or closed after it.

    Args:
        thread: that makes them; by default the one that writes.
    """

    def __init__(self, thread: _Thread | None = None) -> None:
        self._thread = _thread if thread is None else thread
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()
        self._num_pending = 0
        self._is_stopped = False

    def submit(self, call: Callable[[], object]) -> None:
        """Makes the call after all earlier ones; here and now if no thread can be started."""
        self._num_pending += 1
        self._thread.run(lambda: self._make(call))

    def wait(self, *, num_pending: int = 0) -> None:
        """Waits until at most this many calls are left.

        Raises:
            BaseException: what the first call that failed raised.
        """
        while self._num_pending > num_pending:
            error = self._results.get()
            self._num_pending -= 1
            if error is not None:
                raise error

    def _make(self, call: Callable[[], object]) -> None:
        try:
            if not self._is_stopped:
                call()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self._is_stopped = True
            self._results.put(error)
        else:
            self._results.put(None)

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped = True
        interrupted: KeyboardInterrupt | None = None
        while self._num_pending:
            try:
                self._results.get()
                self._num_pending -= 1
            except KeyboardInterrupt as interrupt:  # the memory is still in use
                interrupted = interrupt
        if interrupted is not None:
            raise interrupted


def make_at_once(calls: Sequence[Callable[[], object]]) -> None:
    """Makes calls that wait for the disk, several at the same time and in no order.

    Raises:
        BaseException: what one of them raised; then others may not have been made.
    """
    with ExitStack() as stack:
        queues = [stack.enter_context(Calls(thread)) for thread in _sync_threads]
        for queue, call in zip(cycle(queues), calls, strict=False):
            queue.submit(call)
        for queue in queues:
            queue.wait()


class _Thread:
    """One daemon thread, started with the first call, that makes calls in their order."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_started = False

    def run(self, call: Callable[[], object]) -> None:
        """Makes the call, which raises nothing; in this thread if none can be started."""
        if self._start():
            self._calls.put(call)
        else:
            call()

    def _start(self) -> bool:
        if sys.is_finalizing():  # daemon threads have stopped for good: nobody would make the call
            return False
        with self._lock:
            if not self._is_started:
                thread = threading.Thread(target=self._work, name="resumekit-io", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the interpreter is shutting down, or has too many threads
                    return False
                self._is_started = True
        return True

    def _work(self) -> None:
        while True:
            self._calls.get()()


ring = Ring()
_thread = _Thread()
_sync_threads = [_Thread() for _ in range(_NUM_SYNCS)]


def _replace_after_fork() -> None:
    global ring, _thread
    ring, _thread = Ring(), _Thread()
    _sync_threads[:] = [_Thread() for _ in _sync_threads]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_after_fork)


# ---------------------------------------------------------------- files made durable together


class UnsyncedFiles(AbstractContextManager["UnsyncedFiles"]):
    """Complete files that are still open. As a context manager it syncs them, or closes them.

    No sync is repeated: after a failed one the file is closed.

    Args:
        file_system: the file system. Others than a local disk are called in order, one by one.
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
            is_local = isinstance(self._file_system, LocalFileSystem)
            if is_local and not isinstance(self._file_system, SharedMemoryFileSystem):
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
