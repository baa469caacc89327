"""Submodules that training adds, removes or replaces: a resumed program has the ones it began with.

The values of a module are restored into the live one of its path. A submodule that the script makes
only in the course of training has none. A copy of another one, as a MetricTracker of torchmetrics
appends it in each epoch (1.9 wrappers/tracker.py ``increment``), is made again; all others are
reported.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from resumekit.capture.restore import class_name
from resumekit.capture.user_state.slots import submodules
from resumekit.state import CaptureLine, Fidelity

Classes = Mapping[str, Mapping[str, str]]  # of the direct submodules, by name, by path
Copies = Mapping[str, Mapping[str, str]]  # the name of the original, by name, by path


def submodules_of(objects: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The class of each direct submodule, by name, for each module among some objects, by path."""
    return {
        path: {name: class_name(each) for name, each in submodules(module)}
        for path, module in objects.items()
        if isinstance(module, nn.Module)
    }


def copies_in(former: Classes, objects: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The submodules that training appended to a ModuleList as copies of one that was there.

    Such a copy has the class of its original, and nothing in its ``state_dict``: what it holds is
    user state. A layer with parameters is none, as an optimizer may not know them yet.

    Args:
        former: ``submodules_of`` of the module as the script made it.
        objects: the objects as they are, by path.
    """
    found: dict[str, dict[str, str]] = {}
    for path, module in objects.items():
        if not isinstance(module, nn.ModuleList) or path not in former:
            continue
        originals = {kind: name for name, kind in reversed([*former[path].items()])}
        for name, each in submodules(module):
            original = originals.get(class_name(each))
            if name not in former[path] and original is not None and not each.state_dict():
                found.setdefault(path, {})[name] = original
    return found


def copied_paths(copies: Copies) -> list[str]:
    """The paths of the copies."""
    return [f"{path}.{name}" for path, names in copies.items() for name in names]


def are_copies(given: Any) -> bool:
    """Whether a value of a checkpoint is what ``copies_in`` gives."""
    return isinstance(given, dict) and all(
        isinstance(originals, dict)
        and all(name.isdecimal() and isinstance(each, str) for name, each in originals.items())
        for originals in given.values()
    )


def restore_copies(saved: Copies, former: Classes, objects: Mapping[str, Any]) -> bool:
    """Makes the copies that a checkpoint has, and removes those that it lacks.

    Args:
        saved: ``copies_in`` when it was written.
        former: ``submodules_of`` of the modules as the script made them.
        objects: the objects as they are, by path.

    Returns:
        Whether there were any.
    """
    live = copies_in(former, objects)
    for path, originals in saved.items():
        parent = objects.get(path)
        modules = parent._modules if isinstance(parent, nn.ModuleList) else {}
        for name in live.get(path, {}).keys() - originals.keys():
            del modules[name]
        for name, original in originals.items():
            if name not in modules and original in modules:
                modules[name] = copy.deepcopy(modules[original])
    return bool(saved)


def submodule_lines(
    former: Classes, objects: Mapping[str, Any], copies: Copies
) -> Iterator[CaptureLine]:
    """A line for each submodule that differs, by its path.

    Args:
        former: ``submodules_of`` when training began.
        objects: the objects as they are, by path.
        copies: those that are restored.
    """
    now = submodules_of(objects)
    for path in former.keys() & now.keys():
        for name in sorted(former[path].keys() | now[path].keys()):
            before, after = former[path].get(name), now[path].get(name)
            if before == after or _is_lazy(before) or name in copies.get(path, {}):
                continue
            what = "added" if before is None else "removed" if after is None else "replaced"
            key = f"{path}.{name}"
            remedy = f'do that before the first batch, or pass transient={{"{key}"}}'
            yield CaptureLine(key, Fidelity.LOST, f"training {what} this module; {remedy}")


def _is_lazy(name: str | None) -> bool:
    """Whether torch gives such a module another class at its first call, as ``LazyLinear``."""
    return name is not None and name.rpartition(".")[2].startswith("Lazy")
