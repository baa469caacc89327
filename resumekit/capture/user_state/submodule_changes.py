"""Submodules that training adds, removes or replaces: a resumed program has the ones it began with.

The values of a module are restored into the live one of its path. A submodule that the script makes
only in the course of training has none, so it is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from resumekit.capture.mismatch import class_name
from resumekit.capture.user_state.slots import submodules
from resumekit.contract import CaptureLine, Fidelity


def submodules_of(objects: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The class of each direct submodule, by name, for each module among some objects, by path."""
    return {
        path: {name: class_name(each) for name, each in submodules(module)}
        for path, module in objects.items()
        if isinstance(module, nn.Module) and not _appends_metrics(module)
    }


def submodule_lines(
    former: Mapping[str, Mapping[str, str]], objects: Mapping[str, Any]
) -> Iterator[CaptureLine]:
    """A line for each submodule that differs, by its path.

    Args:
        former: ``submodules_of`` when training began.
        objects: the objects as they are, by path.
    """
    now = submodules_of(objects)
    for path in former.keys() & now.keys():
        for name in sorted(former[path].keys() | now[path].keys()):
            before, after = former[path].get(name), now[path].get(name)
            if before == after or _is_lazy(before):
                continue
            what = "added" if before is None else "removed" if after is None else "replaced"
            key = f"{path}.{name}"
            remedy = f'do that before the first batch, or pass transient={{"{key}"}}'
            yield CaptureLine(key, Fidelity.LOST, f"training {what} this module; {remedy}")


def _appends_metrics(module: nn.Module) -> bool:
    """Whether it is torchmetrics' MetricTracker, which Lightning's adapter restores.

    torchmetrics 1.9 wrappers/tracker.py ``increment``.
    """
    return hasattr(module, "n_steps") and hasattr(module, "increment")


def _is_lazy(name: str | None) -> bool:
    """Whether torch gives such a module another class at its first call, as ``LazyLinear``."""
    return name is not None and name.rpartition(".")[2].startswith("Lazy")
