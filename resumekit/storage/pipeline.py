"""Overlaps file I/O with other work: a ring of buffers, and one thread that writes in order.

Both exist once in a process, are made on first use, and are replaced in a forked child, which has
neither the thread nor the memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from resumekit.storage.host_memory import HostBuffer

# Writes of 8 MiB reach a fast disk's limit; 4 MiB take 5% longer, more than 8 MiB gains nothing.
CHUNK_BYTES = 8 << 20
_NUM_CHUNKS = 3


class Ring:
    """Aligned buffers of ``CHUNK_BYTES``, kept for the life of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buffer: HostBuffer | None = None

    @contextmanager
    def lent(self) -> Iterator[list[memoryview]]:
        """The buffers, to one caller at a time.

        Raises:
            OSError: ENOMEM.
        """
        with self._lock:
            if self._buffer is None or self._buffer.num_bytes != _NUM_CHUNKS * CHUNK_BYTES:
                self._buffer = HostBuffer(_NUM_CHUNKS * CHUNK_BYTES)
            view = self._buffer.view
            yield [view[at : at + CHUNK_BYTES] for at in range(0, view.nbytes, CHUNK_BYTES)]


class Calls:
    """Calls on one file, made in order by the thread of the process while the caller works on.

    After the first one that raises, none of the later ones is made. As a context manager it leaves
    no call behind: whatever they work on may be reused or closed after it.
    """

    def __init__(self) -> None:
        self._results: SimpleQueue[BaseException | None] = SimpleQueue()
        self._num_pending = 0
        self._is_stopped = False

    def submit(self, call: Callable[[], object]) -> None:
        """Makes the call after all earlier ones; here and now if no thread can be started."""
        self._num_pending += 1
        _thread.run(lambda: self._make(call))

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


def _replace_after_fork() -> None:
    global ring, _thread
    ring, _thread = Ring(), _Thread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_after_fork)
