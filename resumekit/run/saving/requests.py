"""Requests of the ranks (a signal to leave, a timer), all-reduced; ``StepBoundary`` decides."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, NamedTuple

from resumekit.distributed import World
from resumekit.errors import RankDisagreementError
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


# ---------------------------------------------------------------- all-reduced


class Requests(NamedTuple):
    """What a rank requests; of several ranks' the largest value counts.

    Args:
        leave: the number of a signal that asks the run to leave; 0 when there was none.
        save: 1 when a clock says that a save is due, else 0.
        busy: 1 while a save is being written in the background, else 0.
        failed: 1 when a save in the background has failed, else 0.
    """

    leave: int = 0
    save: int = 0
    busy: int = 0
    failed: int = 0


NOTHING = Requests()


class RequestExchange:
    """Overlapped all-reduce of the ranks' requests; it also checks that they are at one step.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_alone = world.world_size == 1
        self._own_requests = NOTHING  # that a rank alone has sent last
        self._step = 0  # that this rank was at when it last spoke
        self._under_way: Callable[[], list[int]] | None = None

    def receive(self, requests: Requests) -> Requests:
        """The all-reduced requests of the boundary before; in a world of one, its own.

        Raises:
            RankLostError: another rank does not answer.
            RankDisagreementError: another rank was at another step there.
        """
        if self._is_alone:
            return requests
        common = self.wait()
        self._under_way = None
        return common

    def send(self, requests: Requests, step: int) -> None:
        """Sends the requests of this rank, which are received at the next boundary. Collective.

        Args:
            requests: of this rank.
            step: the optimizer step that it has done.
        """
        if self._is_alone:
            self._own_requests = requests
        else:
            self._step = step
            self._under_way = self._world.start_max((*requests, step, -step))

    def wait(self) -> Requests:
        """Waits for the all-reduce in progress, and gives what ``receive`` will give.

        That is what was sent last, so it holds for this step boundary. None under way: no requests.

        Raises:
            RankLostError: another rank does not answer.
            RankDisagreementError: another rank is at another step.
        """
        if self._under_way is None:
            return self._own_requests
        *common, highest, negated = self._under_way()
        if highest != -negated:
            raise RankDisagreementError(
                "step()",
                found=f"rank {self._world.rank} has done {self._step} steps (all ranks: "
                f"{-negated} to {highest})",
                expected="the same number on all ranks",
                remedy="Call step() once for each optimizer step, on every rank",
            )
        return Requests(*common)
