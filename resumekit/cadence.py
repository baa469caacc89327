"""When saves are due: at multiples of a number of steps, or after an interval.

``save_every="auto"`` chooses the interval from the measured cost of a save:

- The interval is that of Young and Daly, ``sqrt(2 * cost * mtbf)``. It minimises what saves and the
  steps that a failure repeats take together.
- A save costs at most 1% of the training time, so the interval is at least 100 costs.
- An interval is at least 10 seconds and at most 30 minutes. The maximum goes before the 1%.
- The first save is due 3 minutes after the start, unless a save has been measured by then.
- The cost is the mean of the last five saves. Rank 0's clock and costs count: a save begins and
  ends with all ranks, so its time on rank 0 is what it takes from the job.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from dataclasses import dataclass, field

from resumekit.errors import ConfigurationError

AUTO = "auto"
MAX_COST_SHARE = 0.01
MIN_INTERVAL_SECONDS = 10.0  # files and deletions have costs that no clock of this job shows
MAX_INTERVAL_SECONDS = 1800.0
FIRST_SAVE_SECONDS = 180.0

# How much of its time the background part of a save is taken to add to training. Measured: about
# nothing for a copy in huge pages that is written with O_DIRECT, 0.14 for a writer that keeps the
# interpreter busy. Comparing step times would show the evaluations and the data loader's pauses.
BACKGROUND_SHARE = 0.25

_NUM_COSTS = 5  # one slow save among them changes the interval by less than a factor of sqrt(5)
_SECONDS = {"h": 3600, "min": 60, "s": 1, "sec": 1}


@dataclass(frozen=True)
class SaveInterval:
    """The interval that ``save_every="auto"`` has chosen, and why.

    Args:
        cost_seconds: what a save adds to the training time.
        mtbf_seconds: the mean time between two failures of the whole job.
    """

    cost_seconds: float
    mtbf_seconds: float

    @property
    def seconds(self) -> float:
        """From the end of a save to the next one.

        Source: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17
        (1974); J. T. Daly, FGCS 22 (2006), adds terms that are small where the cost is far below
        the mtbf.
        """
        best = math.sqrt(2 * self.cost_seconds * self.mtbf_seconds)
        affordable = self.cost_seconds / MAX_COST_SHARE
        return min(max(best, affordable, MIN_INTERVAL_SECONDS), MAX_INTERVAL_SECONDS)

    @property
    def cost_share(self) -> float:
        """What saves add to the training time, as a fraction of it."""
        return self.cost_seconds / self.seconds

    @property
    def is_expensive(self) -> bool:
        """Whether the maximum of the interval makes saves cost more than 1%."""
        return self.cost_share > MAX_COST_SHARE * (1 + 1e-9)

    def differs_from(self, other: SaveInterval | None) -> bool:
        """Whether the interval differs by more than a quarter, or there is no other one."""
        return other is None or abs(self.seconds - other.seconds) > other.seconds / 4

    def __str__(self) -> str:
        """When, after the word "saves"."""
        longest = ", the longest interval" if self.is_expensive else ""
        share = f"{round(100 * self.cost_share, 2):g}% of the training time"
        cost = f"{_rounded(self.cost_seconds)} or {share}"
        mtbf = _duration(self.mtbf_seconds)
        return f"every {_rounded(self.seconds)}{longest}; a save costs {cost}, mtbf {mtbf}"


@dataclass
class Cadence:
    """Whether a save is due at a step boundary; without arguments only on request.

    Args:
        num_steps: due at every multiple of so many steps.
        interval_seconds: due so long after the last save, or after the start.
        mtbf_seconds: due after the interval that the cost of the saves gives with this mean time
            between failures; ``interval_seconds`` is then that of the first save.
    """

    num_steps: int | None = None
    interval_seconds: float | None = None
    mtbf_seconds: float | None = None
    _since: float = field(default_factory=lambda: time.monotonic())
    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_COSTS))

    @property
    def needs_agreement(self) -> bool:
        """Whether ranks may answer differently, as clocks do."""
        return self.interval_seconds is not None

    @property
    def chosen(self) -> SaveInterval | None:
        """The interval that the measured costs give; None before the first, or without "auto"."""
        if self.mtbf_seconds is None or not self._costs:
            return None
        return SaveInterval(sum(self._costs) / len(self._costs), self.mtbf_seconds)

    def is_due(self, step: int) -> bool:
        """Whether a save is due at this step boundary."""
        if self.interval_seconds is not None:
            return time.monotonic() - self._since >= self.interval_seconds
        return self.num_steps is not None and step % self.num_steps == 0

    def saved(self, *, blocked_seconds: float, background_seconds: float = 0.0) -> None:
        """A save was made: takes its cost, and the interval begins.

        Args:
            blocked_seconds: how long training stood still.
            background_seconds: how long it was written while training ran. It is known late: give
                that of the save before.
        """
        self._costs.append(blocked_seconds + BACKGROUND_SHARE * background_seconds)
        if self.chosen is not None:
            self.interval_seconds = self.chosen.seconds
        self.restart()

    def restart(self) -> None:
        """The interval begins, after a save that failed as well."""
        self._since = time.monotonic()

    def __str__(self) -> str:
        """When, after the word "saves"."""
        if self.chosen is not None:
            return str(self.chosen)
        if self.mtbf_seconds is not None:
            return f"automatically, first after {_duration(FIRST_SAVE_SECONDS)}"
        if self.interval_seconds is not None:
            return f"every {_duration(self.interval_seconds)}"
        if self.num_steps is None:
            return "only on save(), on an improved metric and at the end"
        return f"every {self.num_steps} steps" if self.num_steps > 1 else "every step"


def parse_cadence(save_every: int | str | None, mtbf: str = "24h") -> Cadence:
    """The cadence of ``save_every``.

    Args:
        save_every: steps, ``"10min"``, ``"auto"``, or None for saves by request only.
        mtbf: the mean time between failures of the whole job, for ``"auto"``.

    Raises:
        ConfigurationError: not a positive number of steps nor a duration.
    """
    mtbf_seconds = _seconds(mtbf)
    if mtbf_seconds is None:
        expected = 'a duration such as "24h"'
        raise ConfigurationError("mtbf", found=repr(mtbf), expected=expected)
    if save_every is None:
        return Cadence()
    if save_every == AUTO:
        return Cadence(interval_seconds=FIRST_SAVE_SECONDS, mtbf_seconds=mtbf_seconds)
    if isinstance(save_every, int) and not isinstance(save_every, bool) and save_every > 0:
        return Cadence(num_steps=save_every)
    interval_seconds = _seconds(save_every)
    if interval_seconds is not None:
        return Cadence(interval_seconds=interval_seconds)
    raise ConfigurationError(
        "save_every",
        found=repr(save_every),
        expected='a positive number of steps, a duration such as "10min", or "auto"',
    )


def seconds_of(duration: object) -> float | None:
    """The seconds of a duration such as ``"10min"`` or ``"0s"``; None if it is none."""
    if not isinstance(duration, str):
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|sec|min|h)", duration.strip())
    return float(match[1]) * _SECONDS[match[2]] if match else None


def _seconds(duration: object) -> float | None:
    return seconds_of(duration) or None


def _duration(seconds: float) -> str:
    """The same in the largest unit of which it is a multiple."""
    whole = (each for each in _SECONDS.items() if not seconds % each[1])
    unit, length = next(whole, ("s", 1))
    return f"{seconds / length:g} {unit}"


def _rounded(seconds: float) -> str:
    """Two digits of a measured duration."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.2g} s" if seconds < 99.5 else f"{seconds / 60:.2g} min"
