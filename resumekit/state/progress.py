"""How far a run is, and the best value of the metric that selects its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from resumekit.errors import DeclarationError


@dataclass(frozen=True)
class Progress:
    """How far the logical run is. All counts are of the whole run, whatever was restarted.

    Args:
        step: optimizer-step boundaries passed.
        micro_step: batches used.
        epoch: the epoch of the next batch, from 0.
        batch: the index of the next batch in that epoch.
        samples: samples used, summed over the data-parallel ranks.
        tokens: tokens used, summed over the data-parallel ranks.
    """

    step: int = 0
    micro_step: int = 0
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        """Plain values for the manifest."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, int]) -> Progress:
        """The inverse of ``as_dict``."""
        return cls(**{item.name: int(values[item.name]) for item in fields(cls)})


@dataclass(frozen=True)
class BestMetric:
    """The best value seen of the metric that selects checkpoints.

    Args:
        name: the keyword given to ``report``.
        mode: ``"min"`` or ``"max"``.
        value: the best value so far; None before the first report.
        step: the optimizer step it belongs to.
    """

    name: str
    mode: str = "min"
    value: float | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise DeclarationError("mode", found=repr(self.mode), expected="'min' or 'max'")

    def improved_by(self, value: float) -> bool:
        """Whether this value is better; a NaN never is."""
        if math.isnan(value):
            return False
        if self.value is None:
            return True
        return value < self.value if self.mode == "min" else value > self.value

    def with_value(self, value: float, step: int) -> BestMetric:
        """The same metric with a new best value."""
        return replace(self, value=float(value), step=step)
