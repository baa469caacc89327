"""What triggers a save (steps, a timer, a signal on any rank); ``StepBoundary`` decides on it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

from resumekit.distributed import World
from resumekit.errors import ConfigurationError, RankDisagreementError

_SECONDS = {"h": 3600, "min": 60, "s": 1, "sec": 1}


@dataclass
class Cadence:
    """Whether a save is due at a step boundary; with neither argument only on request.

    Args:
        num_steps: due at every multiple of so many steps.
        interval_seconds: due so long after the last save, or after the start.
    """

    num_steps: int | None = None
    interval_seconds: float | None = None
    _since: float = field(default_factory=time.monotonic)

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks may answer differently, as clocks do."""
        return self.interval_seconds is not None

    def is_due(self, step: int) -> bool:
        """Whether a save is due at this step boundary."""
        if self.interval_seconds is not None:
            return time.monotonic() - self._since >= self.interval_seconds
        return self.num_steps is not None and step % self.num_steps == 0

    def saved(self) -> None:
        """A save was made."""
        self._since = time.monotonic()

    def __str__(self) -> str:
        """When, after the word "saves"."""
        if self.interval_seconds is not None:
            whole = (each for each in _SECONDS.items() if not self.interval_seconds % each[1])
            unit, seconds = next(whole, ("s", 1))
            return f"every {self.interval_seconds / seconds:g} {unit}"
        if self.num_steps is None:
            return "only on save(), on an improved metric and at the end"
        return f"every {self.num_steps} steps" if self.num_steps > 1 else "every step"


def parse_cadence(save_every: int | str | None) -> Cadence:
    """The cadence of ``save_every``: steps, ``"10min"``, or None for saves by request only.

    Raises:
        ConfigurationError: not a positive number of steps nor a duration.
    """
    if save_every is None:
        return Cadence()
    if isinstance(save_every, int) and not isinstance(save_every, bool) and save_every > 0:
        return Cadence(num_steps=save_every)
    if isinstance(save_every, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|sec|min|h)", save_every.strip())
        if match and float(match[1]) > 0:
            return Cadence(interval_seconds=float(match[1]) * _SECONDS[match[2]])
    raise ConfigurationError(
        "save_every",
        found=repr(save_every),
        expected='a positive number of steps, or a duration such as "10min"',
        remedy='"auto" is not available yet' if save_every == "auto" else None,
    )


# What these do to a process that has not asked for them.
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)

# nohup and a command in the background (``&``) have these ignored: nobody here handles them.
_IGNORED_BY_SHELLS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_installed: weakref.WeakSet[LeaveSignals] = weakref.WeakSet()


class LeaveSignals:
    """Records the first signal that this process receives.

    The handler does nothing else: what it interrupts may be any line of the step, or of a save. A
    second SIGINT is a KeyboardInterrupt, as ever.

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
        self.received = 0

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
            signal.default_int_handler(number, frame)
        else:
            self.received = self.received or number

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


class Requests(NamedTuple):
    """What a rank requests; of several ranks' the largest value counts.

    Args:
        leave: the number of a signal that asks the run to leave; 0 when there was none.
        save: 1 when a clock says that a save is due, else 0.
    """

    leave: int = 0
    save: int = 0


class RequestExchange:
    """Overlapped all-reduce of the ranks' requests; it also checks that they are at one step.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._step = 0  # that this rank was at when it last spoke
        self._under_way: Callable[[], list[int]] | None = None

    def receive(self, requests: Requests) -> Requests:
        """The all-reduced requests of the boundary before; in a world of one, its own.

        Raises:
            RankLostError: another rank does not answer.
            RankDisagreementError: another rank was at another step there.
        """
        if self._world.world_size == 1:
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
        if self._world.world_size > 1:
            self._step = step
            self._under_way = self._world.start_max((*requests, step, -step))

    def wait(self) -> Requests:
        """Waits for the all-reduce in progress; ``receive`` gives its result.

        Raises:
            RankLostError: another rank does not answer.
            RankDisagreementError: another rank is at another step.
        """
        if self._under_way is None:
            return Requests()
        leave, save, highest, negated = self._under_way()
        if highest != -negated:
            raise RankDisagreementError(
                "step()",
                found=f"rank {self._world.rank} has done {self._step} steps (all ranks: "
                f"{-negated} to {highest})",
                expected="the same number on all ranks",
                remedy="Call step() once for each optimizer step, on every rank",
            )
        return Requests(leave, save)
