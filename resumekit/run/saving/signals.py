"""Signals that ask a run to save and leave."""

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
    """Records the first signal that this process receives.

    The handler does nothing else: what it interrupts may be any line of the step, or of a save. A
    second SIGINT is a KeyboardInterrupt, as ever, and nobody waits for a save in the background any
    more. Other signals change nothing after the first one.

    Args:
        names: of the signals, e.g. ``"SIGTERM"``.

    Attributes:
        received: the number of the signal, 0 while there was none.
        former: the handlers from before, by signal.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._numbers = [signal.Signals[name] for name in names]
        self.former: dict[int, Any] = {}
        self._is_listening = False
        self._received_at = 0.0
        self.received = 0

    @property
    def seconds_since(self) -> float:
        """How long ago the signal came; 0 while there was none."""
        return time.monotonic() - self._received_at if self.received else 0.0

    def install(self) -> list[str]:
        """Takes the signals that nobody else handles.

        Returns:
            The names of those that it leaves to others.
        """
        if threading.current_thread() is not threading.main_thread():
            return [number.name for number in self._numbers]  # only the main thread may
        left = []
        self._is_listening = True
        for number in self._numbers:
            former = _former_handler(number)
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
        """Gives the signals back."""
        self._is_listening = False
        is_main = threading.current_thread() is threading.main_thread()
        for number, former in self.former.items() if is_main else ():
            if signal.getsignal(number) == self._note:  # nobody else has taken it since
                signal.signal(number, former)

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
            is_end = number == signal.SIGTERM
            signal.signal(number, signal.SIG_DFL if is_end else signal.SIG_IGN)


def _former_handler(number: signal.Signals) -> Any:
    """What handles the signal; a run that was abandoned without ``close`` does not count."""
    handler = signal.getsignal(number)
    owner = getattr(handler, "__self__", None)
    return owner.former[number] if isinstance(owner, LeaveSignals) else handler


def _after_fork() -> None:
    for each in list(_installed):
        each.release_in_child()


os.register_at_fork(after_in_child=_after_fork)
