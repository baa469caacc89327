"""When saves are due: at multiples of a number of steps, or after an interval."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field

from resumekit.errors import ConfigurationError

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
