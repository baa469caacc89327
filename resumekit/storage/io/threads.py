"""Threads for work on memory that runs without the interpreter's lock: digests and copies."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

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
