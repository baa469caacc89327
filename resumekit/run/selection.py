"""The best metric so far, as a component of the run's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from resumekit.errors import CheckpointError
from resumekit.state import BestMetric, ComponentState
from resumekit.storage import StepName, Store


class BestSelection(ComponentState):
    """Follows one reported metric and remembers its best value and step.

    Args:
        name: the keyword of ``report``, or None when no metric selects.
        mode: ``"min"`` or ``"max"``.
    """

    def __init__(self, name: str | None, mode: str) -> None:
        self.best = BestMetric(name, mode) if name is not None else None
        self._latest: tuple[int, float] | None = None

    @property
    def was_reported(self) -> bool:
        """Whether the metric has had a value, in this process or before the checkpoint."""
        return self._latest is not None

    def report(self, values: Mapping[str, float], step: int) -> bool:
        """Takes the values reported for a step; whether the best one improved."""
        if self.best is None or self.best.name not in values:
            return False
        value = values[self.best.name]
        self._latest = (step, value)
        improved = self.best.improved_by(value)
        if improved:
            self.best = self.best.with_value(value, step)
        return improved

    def metric_of(self, step: int) -> dict[str, str] | None:
        """The manifest's record of the metric at this step, or None if none was reported."""
        if self.best is None or self._latest is None or self._latest[0] != step:
            return None
        return {"name": self.best.name, "mode": self.best.mode, "value": self._latest[1].hex()}

    def state_dict(self) -> dict[str, Any]:
        """The best value, its step and its metric."""
        if self.best is None:
            return {}
        best = self.best
        latest = list(self._latest) if self._latest else None
        return {
            "name": best.name,
            "mode": best.mode,
            "value": best.value,
            "step": best.step,
            "latest": latest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Takes the best value over, unless this run selects by another metric.

        Returns:
            What was not restored: the best value of another metric.
        """
        best = self.best
        if best is None or not state:
            return ()
        if (state["name"], state["mode"]) != (best.name, best.mode):
            return (
                f"best_metric: was {state['name']} ({state['mode']}) in the checkpoint, the "
                f"script's {best.name} ({best.mode}) is used; it has no best value yet",
            )
        self.best = BestMetric(best.name, best.mode, state["value"], state["step"])
        latest = state["latest"]
        self._latest = (int(latest[0]), float(latest[1])) if latest else None
        return ()


def best_step(store: Store, metric: BestMetric) -> tuple[StepName, float] | None:
    """The committed checkpoint with the best value of a metric, and that value; or None."""
    best, metric = None, replace(metric, value=None)
    for name in store.step_names():
        value = _value(store, name, metric)
        if value is not None and metric.improved_by(value):
            metric, best = metric.with_value(value, name.step), (name, value)
    return best


def _value(store: Store, name: StepName, metric: BestMetric) -> float | None:
    try:
        saved = store.open_step(name).manifest.metric
    except CheckpointError:
        return None
    return float.fromhex(saved["value"]) if saved and saved["name"] == metric.name else None
