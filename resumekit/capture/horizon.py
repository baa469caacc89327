"""What shapes a learning-rate schedule: how long it is, and the other settings.

Loading a scheduler brings its old settings back in silence, so a run that was given another length
would keep to the old one. These values are taken when a run starts, before anything is loaded, and
compared with those of the checkpoint.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# The lengths among the attributes of torch 2.13 lr_scheduler.py and swa_utils.py; of other classes
# every whole number counts that a constructor was given.
_LENGTHS = frozenset(
    {
        "T_0",
        "T_max",
        "T_mult",
        "_milestones",
        "_schedule_phases",
        "anneal_epochs",
        "milestones",
        "step_ratio",
        "step_size",
        "total_iters",
        "total_size",
        "total_steps",
    }
)
# Whole numbers that are no length all the same; so are learning rates.
_NO_LENGTHS = frozenset({"cooldown", "eta_min", "factor", "gamma", "last_epoch", "patience"})
# Lists longer than this are data, not a setting.
_LONGEST_SETTING = 256


def horizon(scheduler: Any) -> dict[str, Any]:
    """How long the schedule is: ``T_max``, ``total_steps``, ``milestones``, a lambda's numbers, ..

    Parts of a composed schedule and callables have dotted names, ``_schedulers[0].T_max``.

    Args:
        scheduler: any learning-rate scheduler.
    """
    found = dict(horizon_attributes(scheduler))
    for name, function in callables(scheduler):
        found.update({f"{name}.{key}": value for key, value in _arguments(function).items()})
    for name, part in parts(scheduler):
        found.update({f"{name}.{key}": value for key, value in horizon(part).items()})
    return found


def settings(scheduler: Any) -> dict[str, Any]:
    """What the scheduler was built with beside its horizon: ``gamma``, ``eta_min``, ``mode``, .."""
    lengths = horizon_attributes(scheduler)
    built = _constructor_attributes(scheduler)
    found = {name: value for name, value in built.items() if name not in lengths}
    for name, function in callables(scheduler):
        code = getattr(inspect.unwrap(_plain_function(function)), "__code__", None)
        numbers = [c for c in getattr(code, "co_consts", ()) if isinstance(c, (int, float))]
        found[f"{name}.constants"] = numbers
    for name, part in parts(scheduler):
        found.update({f"{name}.{key}": value for key, value in settings(part).items()})
    return found


def horizon_attributes(scheduler: Any) -> dict[str, Any]:
    """The scheduler's own attributes that make up its horizon, without parts and callables."""
    attributes = vars(scheduler)
    found = {name: attributes[name] for name in sorted(_LENGTHS) if name in attributes}
    built = _constructor_attributes(scheduler, skip_torch=True)
    return {**found, **{name: value for name, value in built.items() if _is_length(name, value)}}


def callable_attributes(function: Any) -> dict[str, Any]:
    """The settings that a callable object keeps in itself; nothing for a function."""
    if isinstance(function, (functools.partial, types.FunctionType, types.MethodType)):
        return {}
    return _constructor_attributes(function)


def parts(scheduler: Any) -> Iterator[tuple[str, Any]]:
    """The schedulers that this one is composed of, by name (SequentialLR, ChainedScheduler)."""
    for index, part in enumerate(getattr(scheduler, "_schedulers", ())):
        yield f"_schedulers[{index}]", part


def callables(scheduler: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The callables that shape the schedule, by name (LambdaLR, MultiplicativeLR, CyclicLR)."""
    for index, function in enumerate(getattr(scheduler, "lr_lambdas", ())):
        yield f"lr_lambdas[{index}]", function
    custom = getattr(scheduler, "_scale_fn_custom", None)
    if custom is not None:
        yield "scale_fn", custom


def _is_length(name: str, value: Any) -> bool:
    if name in _NO_LENGTHS or "lr" in name.split("_") or isinstance(value, bool):
        return False
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(each, int) for each in value)
    return isinstance(value, int)


def _constructor_attributes(built: Any, *, skip_torch: bool = False) -> dict[str, Any]:
    """The plain attributes that carry the name of an argument of the constructor."""
    attributes = getattr(built, "__dict__", {})
    found = {}
    for argument in _constructor_arguments(type(built), skip_torch=skip_torch):
        for name in (argument, f"_{argument}", f"{argument}s"):
            if name in attributes and _is_plain(attributes[name]) and name != "last_epoch":
                found[name] = attributes[name]
    return found


def _constructor_arguments(kind: type, *, skip_torch: bool) -> list[str]:
    names: list[str] = []
    for base in kind.__mro__:
        constructor = base.__dict__.get("__init__")
        is_torchs = base.__module__.partition(".")[0] == "torch"
        if inspect.isfunction(constructor) and not (skip_torch and is_torchs):
            names += list(inspect.signature(constructor).parameters)[1:]
    return names


def _arguments(function: Any) -> dict[str, Any]:
    """The plain values that a callable computes with: bound, closed over, global or its own."""
    if isinstance(function, functools.partial):
        bound = {str(index): value for index, value in enumerate(function.args)}
        return {**_arguments(function.func), **_only_plain({**bound, **function.keywords})}
    code_owner = _plain_function(function)
    if not isinstance(code_owner, types.FunctionType):
        return callable_attributes(function)
    outside = inspect.getclosurevars(code_owner)
    seen = {**outside.globals, **outside.nonlocals}
    found = _only_plain({**seen, **_defaults(code_owner)})
    if isinstance(function, types.MethodType):
        seen["self"] = function.__self__
    for name, holder in seen.items():  # `args.max_steps`: an attribute of what the code refers to
        attributes = getattr(holder, "__dict__", {})
        if isinstance(holder, (types.ModuleType, type, types.FunctionType)):
            continue
        mentioned = code_owner.__code__.co_names
        used = {key: attributes[key] for key in mentioned if key in attributes}
        found.update({f"{name}.{key}": value for key, value in _only_plain(used).items()})
    return found


def _plain_function(function: Any) -> Any:
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return function


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def _only_plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, (bool, int, float, str)) or value is None:
        return True
    if isinstance(value, Mapping):
        return len(value) <= _LONGEST_SETTING and all(map(_is_plain, [*value, *value.values()]))
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return len(value) <= _LONGEST_SETTING and all(map(_is_plain, value))
    return False
