"""MetricTrackers of torchmetrics: they append a metric in each epoch.

The tracker of user state finds modules that the script makes, not those that training appends.
torchmetrics 1.9 wrappers/tracker.py ``increment``, metric.py ``metric_state``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from resumekit.capture.inplace import Restorer
from resumekit.contract import SharingPattern, StateComponent
from resumekit.layout import WorldChange

_KEY = "callbacks/metric_trackers"


class MetricTrackers:
    """The metrics of each tracker in a module, or in attributes of callbacks.

    Args:
        module: the LightningModule.
        callbacks: objects whose attributes are looked through, by name.
    """

    def __init__(self, module: nn.Module, callbacks: Mapping[str, Any]) -> None:
        self._module = module
        self._callbacks = dict(callbacks)
        self._pending: Mapping[str, Any] | None = None

    def component(self) -> StateComponent:
        """Each rank has its own."""
        return StateComponent(
            _KEY, self, SharingPattern.PER_RANK, required=False, framework="Lightning"
        )

    def state_dict(self) -> dict[str, Any]:
        """The live values, not copies."""
        if self._pending is not None:
            return dict(self._pending)
        return {
            path: {
                "n_steps": tracker.n_steps,
                "metrics": {
                    name: {**each.metric_state, "_update_count": each._update_count}
                    for name, each in tracker.named_modules()
                    if hasattr(each, "_update_count")
                },
            }
            for path, tracker in self._found()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Keeps the state until ``restore_now``: hooks before the first batch may reset it."""
        self._pending = state
        return ()

    def start_fresh(self) -> tuple[str, ...]:
        """A run without trackers has none."""
        return ()

    def resplit_state_dict(
        self, states: Mapping[int, Mapping[str, Any]], change: WorldChange
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What one former rank had."""
        return dict(states[change.model_rank]), ()

    def restore_now(self) -> None:
        """Gives each tracker as many metrics as it had, with their sums; once."""
        pending, self._pending = self._pending or {}, None
        restore = Restorer()
        for path, tracker in [*self._found()]:
            if path not in pending:
                continue
            while tracker.n_steps < pending[path]["n_steps"]:
                tracker.increment()
            while tracker.n_steps > pending[path]["n_steps"]:
                tracker._modules.popitem()
            for name, each in tracker.named_modules():
                if name in pending[path]["metrics"]:
                    vars(each).update(restore(None, pending[path]["metrics"][name]))
                    each.to(each.device)

    def _found(self) -> Iterator[tuple[str, Any]]:
        given = {"module": self._module}
        for callback, value in self._callbacks.items():
            modules = {k: v for k, v in vars(value).items() if isinstance(v, nn.Module)}
            given.update({f"{callback}.{name}": each for name, each in modules.items()})
        for prefix, root in given.items():
            for name, each in root.named_modules(prefix=prefix):
                if hasattr(each, "n_steps") and hasattr(each, "increment"):
                    yield name, each
