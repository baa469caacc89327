"""When a save is due."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Protocol

from resumekit.errors import ConfigurationError

_SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600}


class Cadence(Protocol):
    """Says at each step boundary whether a save is due.

    ``needs_agreement`` is True where ranks may answer differently, as clocks do.
    """

    needs_agreement: bool

    def is_due(self, step: int) -> bool: ...

    def saved(self) -> None: ...

    def __str__(self) -> str:
        """When, after the word "saves"."""
        ...


@dataclass
class EverySteps:
    """Due at every multiple of ``num_steps``."""

    num_steps: int
    needs_agreement: bool = False

    def __str__(self) -> str:
        return f"every {self.num_steps} steps" if self.num_steps > 1 else "every step"

    def is_due(self, step: int) -> bool:
        return step % self.num_steps == 0

    def saved(self) -> None:
        return None


@dataclass
class EverySeconds:
    """Due when ``interval_seconds`` have passed since the last save, or since the start."""

    interval_seconds: float
    needs_agreement: bool = True
    _since: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        units = [("h", 3600), ("min", 60), ("s", 1)]
        unit, seconds = next(
            (each for each in units if not self.interval_seconds % each[1]), units[-1]
        )
        return f"every {self.interval_seconds / seconds:g} {unit}"

    def is_due(self, step: int) -> bool:
        return time.monotonic() - self._since >= self.interval_seconds

    def saved(self) -> None:
        self._since = time.monotonic()


@dataclass
class Never:
    """Due only when asked for."""

    needs_agreement: bool = False

    def __str__(self) -> str:
        return "only on save(), on an improved metric and at the end"

    def is_due(self, step: int) -> bool:
        return False

    def saved(self) -> None:
        return None


def parse_cadence(save_every: int | str | None) -> Cadence:
    """The cadence of ``save_every``: steps, ``"10min"``, or None for saves by request only.

    Raises:
        ConfigurationError: not a positive number of steps nor a duration.
    """
    if save_every is None:
        return Never()
    if isinstance(save_every, int) and not isinstance(save_every, bool) and save_every > 0:
        return EverySteps(save_every)
    if isinstance(save_every, str):
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|sec|min|h)", save_every.strip())
        if match and float(match[1]) > 0:
            return EverySeconds(float(match[1]) * _SECONDS[match[2]])
    raise ConfigurationError(
        "save_every",
        found=repr(save_every),
        expected='a positive number of steps, or a duration such as "10min"',
        remedy='"auto" is not available yet' if save_every == "auto" else None,
    )
