"""Threads that overlap work on memory (digests, copies) and file I/O with other work.

The ring, the thread that writes and those that sync exist once in a process, are made on first use,
and are replaced in a forked child, which has neither the threads nor the memory.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import cycle, islice
from queue import SimpleQueue
from typing import Generic, TypeVar

from resumekit.storage.io.host_memory import HostBuffer

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
