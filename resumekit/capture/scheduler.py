"""A learning-rate scheduler's state, its horizon (how long the schedule is) and its settings.

Loading a scheduler silently restores its old settings, so a run with another length would keep the
old one. Horizon and settings are read when a run starts, before anything is loaded, and compared
with those of the checkpoint.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

from torch import Tensor

from resumekit.capture.nested_state import (
    Mismatch,
    Restorer,
    class_name,
    describe,
    is_same_class,
    leaves,
    refuse,
    require_loadable,
    structure_mismatches,
)
from resumekit.state import Adopting, Checked

_REMEDY = "Build the scheduler as it was when the checkpoint was written"

# Where SequentialLR and ChainedScheduler keep their schedulers. torch 2.13 lr_scheduler.py.
_PARTS = "_schedulers"

# The lengths among the attributes of torch 2.13 lr_scheduler.py and swa_utils.py. Of other classes
# every integer argument of the constructor counts.
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

# Integer arguments that are no lengths; learning rates are none either.
_NO_LENGTHS = frozenset({"cooldown", "eta_min", "factor", "gamma", "last_epoch", "patience"})

# Lists that have one length for as long as the objects are the same.
_LISTS = {
    **dict.fromkeys(("base_lrs", "lr_lambdas", "_last_lr", "min_lrs"), "one a param group"),
    **dict.fromkeys((_PARTS, "_milestones", "_schedule_phases"), "as in this run"),
}

# Lists longer than this are data, not a setting.
_LONGEST_SETTING = 256


class _SchedulerFields(TypedDict):
    classes: dict[str, str]
    state: Any


class SchedulerState(Checked, Adopting):
    """The state of a learning-rate scheduler, its parts and the classes of both.

    Of the callables of a schedule (LambdaLR's, CyclicLR's), the attributes of a callable object are
    saved; a plain function is code of the script.

    Args:
        scheduler: any ``torch.optim.lr_scheduler`` class, or an object with ``state_dict`` and
            ``load_state_dict``.
        key: the component's key, for errors.
        keep_horizon: restore the position in the schedule and keep this run's horizon, for
            ``allow_changes={"horizon"}``.
    """

    schema = _SchedulerFields

    def __init__(
        self, scheduler: Any, *, key: str = "lr_scheduler", keep_horizon: bool = False
    ) -> None:
        self.scheduler = scheduler
        self.key = key
        self.keep_horizon = keep_horizon

    def live_objects(self) -> tuple[Any, ...]:
        # torch 2.13 optim/lr_scheduler.py SequentialLR, ChainedScheduler keep their parts here.
        return (self.scheduler, *getattr(self.scheduler, "_schedulers", ()))

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state, and the classes of it and its parts."""
        return {"classes": _classes(self.scheduler), "state": self.scheduler.state_dict()}

    def adopted(self, given: Any) -> dict[str, Any]:
        """The state; its class is not known, and taken to be the live one."""
        return {"classes": _classes(self.scheduler), "state": given}

    def check_state_dict(self, state: Any) -> None:
        """Refuses other classes, numbers of parts or param groups, and types of callables."""
        live = self.scheduler.state_dict()
        mismatches = list(_class_mismatches(state["classes"], _classes(self.scheduler)))
        refuse(self.key, mismatches, remedy=_REMEDY)
        refuse(self.key, list(_state_mismatches("", state["state"], live)), remedy=_REMEDY)
        if not type(self.scheduler).__module__.startswith("torch."):
            require_loadable(self.key, self.scheduler, state["state"])
            return
        # torch's load takes anything, and a step fails later. An older torch had fewer values.
        wrong = structure_mismatches(state["state"], live, may_lack=True)
        refuse(self.key, [*wrong], remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Restores all but the learning rates, which are optimizer state.

        Returns:
            A message for each attribute that the checkpoint lacks.
        """
        live = self.scheduler.state_dict()
        saved = state["state"]
        both = isinstance(saved, dict) and isinstance(live, dict)
        messages = tuple(
            f"{name} is not in the checkpoint and stays as built"
            for name in (live if both else ())
            if name not in saved
        )
        kept = _horizons(self.scheduler) if self.keep_horizon else []
        # torch's schedulers keep the dict that they load, and some modify it: they get a copy.
        self.scheduler.load_state_dict(_copied(saved, live))
        for owner, attributes in kept:
            vars(owner).update(attributes)
        return messages

    def fingerprint(self) -> dict[str, Any]:
        """The classes, the horizon, and the settings that are not part of it."""
        return {
            "classes": _classes(self.scheduler),
            "horizon": horizon(self.scheduler),
            "settings": settings(self.scheduler),
        }


def _tree(scheduler: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The scheduler and all schedulers that it is composed of (SequentialLR, ChainedScheduler).

    Yields:
        What the names of its values begin with, ``_schedulers[0].``, and the scheduler.
    """
    yield prefix, scheduler
    for index, part in enumerate(getattr(scheduler, _PARTS, ())):
        yield from _tree(part, f"{prefix}{_PARTS}[{index}].")


def _classes(scheduler: Any) -> dict[str, str]:
    """The classes of the scheduler (under ``""``) and of its parts, by dotted name."""
    return {prefix.removesuffix("."): class_name(each) for prefix, each in _tree(scheduler)}


def _class_mismatches(then: Mapping[str, Any], now: Mapping[str, str]) -> Iterator[Mismatch]:
    for where in [*now, *(where for where in then if where not in now)]:
        saved, live = str(then.get(where, "nothing")), now.get(where, "nothing")
        if not is_same_class(saved, live):
            yield Mismatch.changed(where, saved, live)


def _state_mismatches(where: str, then: Any, now: Any) -> Iterator[Mismatch]:
    """Differences that make torch's load fail or restore silently wrong values."""
    if not isinstance(then, dict) or not isinstance(now, dict):
        if type(then) is not type(now):
            yield Mismatch(where, f"{describe(then)} in the checkpoint", f"{describe(now)}")
        return
    for name, reason in _LISTS.items():
        num_then, num_now = _length(then.get(name)), _length(now.get(name))
        if name in now and num_then != num_now:
            yield Mismatch(f"{where}{name}", f"{num_then} entries", f"{num_now}: {reason}")
    for name in ("last_epoch", "_step_count"):
        if type(now.get(name)) is int and type(then.get(name)) is not int:
            yield Mismatch(f"{where}{name}", describe(then.get(name)), "a count")
    for saved, live in zip(_function_kinds(then), _function_kinds(now), strict=False):
        if saved != live:
            yield Mismatch(f"{where}lr_lambdas", saved, live)
    parts = zip(_listed(then.get(_PARTS)), _listed(now.get(_PARTS)), strict=False)
    for index, (part, partner) in enumerate(parts):
        yield from _state_mismatches(f"{where}{_PARTS}[{index}].", part, partner)


def _function_kinds(state: Mapping[str, Any]) -> list[str]:
    # The entry is None for a function, and the attributes for a callable object.
    functions = [*_listed(state.get("lr_lambdas")), state.get("_scale_fn_custom")]
    simple = "a plain function or one without attributes"
    return ["a callable object" if attributes else simple for attributes in functions]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (list, tuple)) else 0


def _copied(saved: Any, live: Any) -> Any:
    """A copy of the saved state with its tensors on the device of the live ones."""
    devices = {each.device for each in leaves(live) if isinstance(each, Tensor)}
    device = devices.pop() if len(devices) == 1 else None

    def new_tensor(value: Tensor) -> Tensor:
        return value.detach().to(device or value.device, copy=True)

    return Restorer()(None, saved, new_tensor)


def _horizons(scheduler: Any) -> list[tuple[Any, dict[str, Any]]]:
    """The horizon attributes of the scheduler, its parts and its callables, by their object."""
    kept: list[tuple[Any, dict[str, Any]]] = []
    for _, each in _tree(scheduler):
        kept.append((each, copy.deepcopy(horizon_attributes(each))))
        kept += [(function, callable_attributes(function)) for _, function in callables(each)]
    return kept


def horizon(scheduler: Any) -> dict[str, Any]:
    """How long the schedule is: ``T_max``, ``total_steps``, ``milestones``, a lambda's numbers, ..

    Parts of a composed schedule and callables have dotted names, ``_schedulers[0].T_max``.

    Args:
        scheduler: any learning-rate scheduler.
    """
    found: dict[str, Any] = {}
    for prefix, each in _tree(scheduler):
        found.update(_prefixed(prefix, horizon_attributes(each)))
        for name, function in callables(each):
            found.update(_prefixed(f"{prefix}{name}.", _arguments(function)))
    return found


def settings(scheduler: Any) -> dict[str, Any]:
    """The constructor's arguments that are no horizon: ``gamma``, ``eta_min``, ``mode``, .."""
    found: dict[str, Any] = {}
    for prefix, each in _tree(scheduler):
        lengths = horizon_attributes(each)
        built = _constructor_attributes(each).items()
        found.update(_prefixed(prefix, {k: v for k, v in built if k not in lengths}))
        for name, function in callables(each):
            code = getattr(inspect.unwrap(_plain_function(function)), "__code__", None)
            numbers = [c for c in getattr(code, "co_consts", ()) if isinstance(c, (int, float))]
            found[f"{prefix}{name}.constants"] = numbers
    return found


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}{name}": value for name, value in values.items()}


def horizon_attributes(scheduler: Any) -> dict[str, Any]:
    """The horizon of the scheduler itself, without its parts and callables."""
    attributes = vars(scheduler)
    found = {name: attributes[name] for name in sorted(_LENGTHS) if name in attributes}
    built = _constructor_attributes(scheduler, skip_torch=True)
    return {**found, **{name: value for name, value in built.items() if _is_length(name, value)}}


def callable_attributes(function: Any) -> dict[str, Any]:
    """The settings that are attributes of a callable object; nothing for a function."""
    if isinstance(function, (functools.partial, types.FunctionType, types.MethodType)):
        return {}
    return _constructor_attributes(function)


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
    """The plain attributes that are named like an argument of the constructor."""
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
    """The plain values that a callable uses: bound, closed over, global or attributes."""
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
    for name, holder in seen.items():  # `args.max_steps`: an attribute of a referenced object
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
