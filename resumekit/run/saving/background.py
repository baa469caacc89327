"""The background thread: it runs the work of saves, one after the other, beside the training.

The queue belongs to the process and not to a run: what was handed over is done, also when nobody
refers to the run any more.

- *Thread*: a daemon thread starts with the first work and ends with the last one. It blocks all
  signals: they interrupt the main thread, as ever.
- *Exit*: an exit handler waits for the work in progress. Nothing starts a thread at exit: work that
  is handed over then is done at once by the caller.
- *Fork*: a child has no work, no thread and a new lock. An exit handler of ours does nothing in it.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from resumekit.errors import ResumekitError
from resumekit.log import warn


class Work:
    """Something that the background thread does once.

    Args:
        what: in messages, e.g. ``"the save at step 5"``.
        action: does it; gives the error that it ended with, or None.

    Attributes:
        seconds: that it took, once it is done.
        is_abandoned: nobody waits for it at exit.
        is_reported: its error was raised or logged.
    """

    def __init__(self, what: str, action: Callable[[], ResumekitError | None]) -> None:
        self.what = what
        self._action = action
        self._done = threading.Event()
        self._error: ResumekitError | None = None
        self.seconds = 0.0
        self.is_abandoned = False
        self.is_reported = False

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self) -> ResumekitError | None:
        """Waits for its end; the error that it ended with, or None."""
        self._done.wait()
        return self._error

    def run(self) -> None:
        """Does it. The background thread only."""
        began = time.monotonic()
        try:
            self._error = self._action()
        finally:
            self.seconds = time.monotonic() - began
            del self._action  # and all that it refers to
            self._done.set()


class _Queue:
    """The work of this process, the oldest first; the first one is in progress."""

    def __init__(self) -> None:
        self._change = threading.Lock()  # held for a few instructions
        self._waiting: deque[Work] = deque()
        self._unreported: list[Work] = []
        self._thread: threading.Thread | None = None
        self._drains_at_exit = False

    def add(self, work: Work) -> None:
        """Hands work over."""
        with self._change:
            self._unreported = [each for each in self._unreported if not each.is_reported]
            self._unreported.append(work)
            self._waiting.append(work)
            must_start = self._thread is None
            if must_start:
                self._thread = threading.Thread(
                    target=self._run_all, name="resumekit-save", daemon=True
                )
        if not must_start:
            return
        if not self._drains_at_exit:
            self._drains_at_exit = True
            atexit.register(_drain_at_exit)
        assert self._thread is not None
        if _is_exiting():
            self._run_all()
            return
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started: at exit since Python 3.12, or too many
            self._run_all()

    def _run_all(self) -> None:
        if threading.current_thread() is self._thread:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            with self._change:
                if not self._waiting:
                    self._thread = None
                    return
                work = self._waiting[0]
            try:
                work.run()
            finally:
                with self._change:
                    self._waiting.popleft()
            del work

    def drain(self, *, abandoned: bool) -> None:
        """Waits for all work; logs the errors that nobody was given."""
        for work in list(self._unreported):
            if work.is_abandoned and not abandoned:
                continue
            error = work.wait()
            if error is not None and not work.is_reported:
                warn("RK-841", "%s failed: %s", work.what, error)
            work.is_reported = True

    def abandon(self) -> None:
        """Nobody waits at exit for what is in progress now. May be called by a signal handler."""
        for work in list(self._unreported):
            work.is_abandoned = True


_queue = _Queue()


def add_work(work: Work) -> None:
    """Hands work to the background thread."""
    _queue.add(work)


def drain() -> None:
    """Waits for all work of this process, whichever run it is of; logs errors nobody was given."""
    _queue.drain(abandoned=True)


def abandon_work() -> None:
    """Nobody waits at exit for what is in progress now. May be called by a signal handler."""
    _queue.abandon()


def _drain_at_exit() -> None:
    with suppress(KeyboardInterrupt):  # an interrupt of the wait abandons the work
        _queue.drain(abandoned=False)


def _is_exiting() -> bool:
    """Whether the interpreter is ending: its exit handlers run when the main thread has ended."""
    return not threading.main_thread().is_alive()


def _forget() -> None:
    """A forked child has no thread, and the lock may be held in it for ever."""
    global _queue
    _queue = _Queue()


os.register_at_fork(after_in_child=_forget)
