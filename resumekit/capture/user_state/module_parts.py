"""Parts of modules that training adds, removes or replaces: no launch makes them again."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from resumekit.capture.nested_state import class_name
from resumekit.capture.user_state.attributes import (
    has_state,
    hooks_of,
    modules_of_list,
    submodules,
)
from resumekit.capture.user_state.exclusions import (
    KINDS_OF_TENSORS,
    named_in_state_dict,
    registered,
)
from resumekit.capture.user_state.value_types import is_library
from resumekit.state import CaptureLine, Fidelity

Parts = Mapping[str, Mapping[str, str]]  # what each part is, by its name, by the module's path
_HOOK = "hook"


def parts_of_modules(objects: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """The parts by which a checkpoint fits a module, for each module among some objects, by path.

    Of a submodule the class, of what is in the ``state_dict`` of the module itself its kind, and
    the hooks of the user's. Submodules that are values of their ModuleList are left out.
    """
    found: dict[str, dict[str, str]] = {}
    for path, module in objects.items():
        if isinstance(module, nn.Module):
            values = modules_of_list(module, "") if isinstance(module, nn.ModuleList) else {}
            names = ((name, each) for name, each in submodules(module) if name not in values)
            found[path] = {name: class_name(each) for name, each in names}
            found[path].update((name, kind) for kind, name, _ in named_in_state_dict(module))
            hooks = (each.func if isinstance(each, partial) else each for each in hooks_of(module))
            found[path].update((_named(each), _HOOK) for each in hooks if not is_library(each))
    return found


def _named(hook: Any) -> str:
    return f"{getattr(hook, '__name__', type(hook).__name__)}()"


def lines_of_changed_parts(
    former: Parts, objects: Mapping[str, Any], of_components: Container[int]
) -> Iterator[CaptureLine]:
    """A line for each part of a module that differs, by its path.

    Args:
        former: ``parts_of_modules`` when training began.
        objects: the objects as they are, by path.
        of_components: the ids of the modules whose ``state_dict`` components save; a resume needs
            the same names in it.
    """
    now = parts_of_modules(objects)
    for path in former.keys() & now.keys():
        for name in sorted(former[path].keys() | now[path].keys()):
            before, after = former[path].get(name), now[path].get(name)
            if before == after or _is_lazy(before):
                continue
            what = "added" if before is None else "removed" if after is None else "replaced"
            kind = after or before
            kind = kind if kind in (*KINDS_OF_TENSORS, _HOOK) else "module"
            key, remedy = f"{path}.{name}", "do that before the first batch"
            reason = f"training {what} this {kind}"
            new = registered(objects[path], "modules").get(name)
            is_stateless = before is None and new is not None and not has_state(new)
            if kind == _HOOK or is_stateless:
                remedy += f', or pass transient={{"{key}"}}'
            elif id(objects[path]) in of_components and (before is None or kind != "module"):
                reason += ", and no launch can resume this run"
            yield CaptureLine(key, Fidelity.LOST, f"{reason}; {remedy}")


def _is_lazy(name: str | None) -> bool:
    """Whether torch gives such a module another class at its first call, as ``LazyLinear``."""
    return name is not None and name.rpartition(".")[2].startswith("Lazy")
