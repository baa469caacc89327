"""torchmetrics that are no submodule from the start: in dicts, in lists, in callbacks, of trackers.

torchmetrics 1.9: what a metric has summed up is in no ``state_dict``, unless it is told so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from resumekit.capture.inplace import Restorer

# Beside what it has declared as its sums: wrappers/minmax.py, wrappers/running.py.
_BESIDE_SUMS = ("min_val", "max_val", "_num_vals_seen")

_OF_MODULES = frozenset(vars(nn.Module()))


class Metrics:
    """What the metrics have summed up, by name, as far as it is not saved with the module.

    Args:
        module: the sums of its submodules are saved elsewhere, if they are there now.
        holders: objects whose attributes are looked through, by name.
    """

    def __init__(self, module: nn.Module, holders: Mapping[str, Any]) -> None:
        self._module = module
        self._holders = dict(holders)
        self._with_module = {id(each) for each in module.modules()}

    def state_dict(self) -> dict[str, Any]:
        """The live values, not copies."""
        states = {name: self._state_of(each) for name, each in self._found()}
        return {name: state for name, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives each metric that has a state what it had summed up."""
        restore = Restorer()
        for name, each in [*self._found()]:
            if _is_tracker(each) and name in state:
                _make_steps(each, state[name]["n_steps"])
        for name, each in self._found():
            if name in state and not _is_tracker(each):
                vars(each).update(restore(None, state[name]))
                each.to(each.device)

    def _state_of(self, metric: Any) -> dict[str, Any]:
        if _is_tracker(metric):
            return {"n_steps": metric.n_steps}
        if not hasattr(metric, "_update_count"):
            return {}
        beside = {name: vars(metric)[name] for name in _BESIDE_SUMS if name in vars(metric)}
        # A Running begins with the defaults of another metric, which nobody may write into: so it
        # is given sums of its own before those of the module are put back in place.
        if id(metric) in self._with_module and not beside:
            return {}
        return {**metric.metric_state, "_update_count": metric._update_count, **beside}

    def _found(self) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for name, each in self._named():
            if id(each) not in seen:
                seen.add(id(each))
                yield name, each

    def _named(self) -> Iterator[tuple[str, Any]]:
        yield from self._module.named_modules()
        for holder, value in self._holders.items():
            for attribute, each in vars(value).items():
                if attribute not in _OF_MODULES:
                    yield from _modules_in(each, f"{holder}/{attribute}")


def _modules_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from value.named_modules(prefix=name)
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in items:
            yield from _modules_in(each, f"{name}.{key}")


def _is_tracker(module: Any) -> bool:
    return hasattr(module, "n_steps") and hasattr(module, "increment")


def _make_steps(tracker: Any, num_steps: int) -> None:
    """Makes or drops metrics: ``increment()`` appends one. torchmetrics 1.9 wrappers/tracker.py."""
    while tracker.n_steps < num_steps:
        tracker.increment()
    while tracker.n_steps > num_steps:
        tracker._modules.popitem()
