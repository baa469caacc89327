"""The signals that ask a run to leave: recorded here, acted on at a safe point by ``due_saves``."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Collection
from types import FrameType
from typing import Any

from resumekit.run.saving.background import abandon_work

# What these do to a process that has not asked for them.
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)

# nohup and a command in the background (``&``) have these ignored: nobody here handles them.
_IGNORED_BY_SHELLS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_installed: weakref.WeakSet[LeaveSignals] = weakref.WeakSet()


class LeaveSignals:
    """Records the first of these signals that this process receives.

    The handler does nothing else: it may interrupt any line of the step, or of a save. A SIGINT, if
    it is among ``names``, raises KeyboardInterrupt at once after the first signal, and the process
    does not wait at exit for a save in the background. Until ``restore``, other signals change
    nothing after the first one.

    Args:
        names: of the signals, e.g. ``"SIGTERM"``.
        iterators: those of the run that are alive; without one its loop was left.

    Attributes:
        received: the number of the signal, 0 while there was none.
        former: the handlers from before, by signal.
    """

    def __init__(self, names: Collection[str], iterators: Collection[Any] = ()) -> None:
        self._numbers = [signal.Signals[name] for name in names]
        self._iterators = iterators
        self.former: dict[int, Any] = {}
        self._taken: dict[int, Any] = {}  # handlers of other runs, by signal
        self._is_listening = False
        self._received_at = 0.0
        self.received = 0

    @property
    def seconds_since(self) -> float:
        """How long ago the signal came; 0 while there was none."""
        return time.monotonic() - self._received_at if self.received else 0.0

    def install(self) -> list[str]:
        """Takes the signals that no other code handles.

        Called when the first loop begins, after the restore.

        Returns:
            The names of those that stay with other code; off the main thread, all. One that the
            shell has set to be ignored is not listed.
        """
        if threading.current_thread() is not threading.main_thread():
            return [number.name for number in self._numbers]  # only the main thread may
        left = []
        self._is_listening = True
        for number in self._numbers:
            former = signal.getsignal(number)
            owner = getattr(former, "__self__", None)
            if isinstance(owner, LeaveSignals):  # of another run, closed or not
                self._taken[number], former = former, owner.former[number]
            if former in _DEFAULTS:
                signal.signal(number, self._note)
                self.former[number] = former
            elif former == signal.SIG_IGN and number in _IGNORED_BY_SHELLS:
                continue
            else:
                left.append(number.name)
        _installed.add(self)
        return left

    def restore(self) -> None:
        """Gives the signals back: to the run around this one, or to what was there before all."""
        self._is_listening = False
        is_main = threading.current_thread() is threading.main_thread()
        for number, former in self.former.items() if is_main else ():
            if signal.getsignal(number) == self._note:  # nobody else has taken it since
                outer = self._taken.get(number)
                is_inside = outer is not None and outer.__self__.is_under_way
                signal.signal(number, outer if is_inside else former)
        self._taken.clear()

    @property
    def is_under_way(self) -> bool:
        """Whether a loop of the run may still act on a signal."""
        return self._is_listening and len(self._iterators) > 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._is_listening:  # others have put this handler back after the run's end
            signal.signal(number, self.former[number])
            signal.raise_signal(number)
        elif self.received and number == signal.SIGINT:
            abandon_work()
            signal.default_int_handler(number, frame)
        elif not self.received:
            self._received_at = time.monotonic()
            self.received = number

    def release_in_child(self) -> None:
        """A forked child, such as a loader's worker, is no run: it ends on SIGTERM.

        The other signals are for its parent. They often reach the whole process group.
        """
        for number in self.former if self._is_listening else ():
            if signal.getsignal(number) == self._note:  # nobody else has taken it since
                is_end = number == signal.SIGTERM
                signal.signal(number, signal.SIG_DFL if is_end else signal.SIG_IGN)


def _after_fork() -> None:
    for each in list(_installed):
        each.release_in_child()


os.register_at_fork(after_in_child=_after_fork)
