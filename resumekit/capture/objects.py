"""States of objects with state_dict: averages, gradient scalers, extras, frameworks' objects."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from resumekit.capture.model import ModelState
from resumekit.capture.nested_state import (
    Mismatch,
    Restorer,
    class_name,
    describe,
    fits,
    is_too_large,
    live_load,
    refuse,
    require_class,
    require_fields,
    require_loadable,
    structure_mismatches,
)
from resumekit.errors import StateMismatchError, UnsupportedValueError
from resumekit.serialization.digests import leaves_of
from resumekit.serialization.planning import encode_local
from resumekit.serialization.tensors import StatePath
from resumekit.state import (
    Adopting,
    Checked,
    ComponentState,
    Renamed,
    Renaming,
    Resplit,
    Stateful,
    WorldChange,
)

_REMEDY = "Build the object as it was when the checkpoint was written"


class ObjectState(Renamed):
    """The state of one averaged model, module or user object.

    ``AveragedModel`` is stored as its weights and ``n_averaged``; its averaging function is code
    of the script. A module is stored like a model. Any other object gives its own state.

    Args:
        given: an ``AveragedModel``, a module, or an object with ``state_dict`` and
            ``load_state_dict``.
        key: the component's key, for errors.
    """

    def __init__(self, given: Any, *, key: str = "ema") -> None:
        self.given = given
        self.key = key
        weights = given.module if isinstance(given, AveragedModel) else given
        self.weights = ModelState(weights, key=key) if isinstance(weights, nn.Module) else None

    def live_objects(self) -> tuple[Any, ...]:
        return (self.given,)

    def state_dict(self) -> dict[str, Any]:
        """The live values, not copies."""
        if self.weights is None:
            return {"class": class_name(self.given), "opaque": self.given.state_dict()}
        return {"weights": self.weights.state_dict(), "counters": self._counters()}

    def replicated_state(self) -> dict[str, Any]:
        """Of a module the parameters, else everything."""
        if self.weights is None:
            return self.state_dict()
        return {"weights": self.weights.replicated_state(), "counters": self._counters()}

    def check_state_dict(self, state: Any) -> None:
        """Refuses weights that do not fit (see ``ModelState``), and the state of another class."""
        if self.weights is None:
            require_fields(self.key, state, {"class": str, "opaque": object})
            require_class(self.key, state["class"], self.given, remedy=_REMEDY)
            require_loadable(self.key, self.given, state["opaque"])
            return
        require_fields(self.key, state, {"weights": dict, "counters": dict})
        self.weights.check_state_dict(state["weights"])
        saved, live = state["counters"], self._counters()
        refuse(
            self.key,
            [
                Mismatch(name, describe(saved.get(name)), f"{describe(value)}, as in this run")
                for name, value in live.items()
                if not fits(value, saved.get(name))
            ],
            remedy=_REMEDY,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Copies every value into the live objects."""
        if self.weights is None:
            self.given.load_state_dict(Restorer()(None, state["opaque"]))
            return ()
        live = self._counters()
        restore = Restorer()
        for name, value in state["counters"].items():
            if name in live:
                restore(live[name], value)
        return self.weights.load_state_dict(state["weights"])

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit | None:
        """Calls the object's own method; None if it has none."""
        if not isinstance(self.given, ComponentState) or self.weights is not None:
            return None
        opaque = {rank: each["opaque"] for rank, each in states.items()}
        resplit = self.given.resplit_state_dict(opaque, change)
        if resplit is None:
            return None
        state, messages = resplit
        return {"class": class_name(self.given), "opaque": state}, messages

    def entries(self, state: Any) -> Mapping[str, Any] | None:
        """The weights of a module."""
        given = state.get("weights") if isinstance(state, Mapping) else None
        return given if self.weights is not None and isinstance(given, Mapping) else None

    def renamed(self, state: Any, renaming: Renaming) -> Any:
        weights = self.entries(state)
        return state if weights is None else {**state, "weights": renaming.keys(weights)}

    def first_rank_only(self) -> frozenset[str]:
        """The unsharded buffers of a module."""
        names = frozenset() if self.weights is None else self.weights.first_rank_only()
        return frozenset(f"weights.{name}" for name in names)

    def _counters(self) -> dict[str, Any]:
        """How many models were averaged; empty for other objects."""
        if not isinstance(self.given, AveragedModel):
            return {}
        return {"n_averaged": self.given.n_averaged}


# ---------------------------------------------------------------- gradient scalers


def _scale_mismatches(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Iterator[Mismatch]:
    """What the load of a scaler would take, and its next update would not."""
    yield from structure_mismatches(saved, live)
    for name, value in live.items():
        then = saved[name]
        if isinstance(value, int) and (type(then) is not type(value) or is_too_large(then)):
            yield Mismatch.changed(name, describe(then), describe(value))
        elif (
            isinstance(value, float) and isinstance(then, (int, float)) and not 0 < then < math.inf
        ):
            yield Mismatch(name, f"{then} in the checkpoint", "a positive number")


_ScalerState = TypedDict("_ScalerState", {"class": str, "values": dict[str, Any]})


class ScalerState(Checked, Adopting):
    """The state of a ``torch.amp.GradScaler`` or of any object with its methods.

    Where the checkpoint has no scaler or a disabled one, the live one keeps its initial state, and
    that is reported.

    Args:
        scaler: the scaler, enabled or not.
        key: the component's key, for errors.
    """

    schema = _ScalerState

    def __init__(self, scaler: Any, *, key: str = "grad_scaler") -> None:
        self.scaler = scaler
        self.key = key

    def live_objects(self) -> tuple[Any, ...]:
        return (self.scaler,)

    def state_dict(self) -> dict[str, Any]:
        """The scaler's own state; its values are empty when it is disabled."""
        return {"class": class_name(self.scaler), "values": self.scaler.state_dict()}

    def adopted(self, given: Any) -> dict[str, Any]:
        """The state; its class is not known, and taken to be the live one."""
        return {"class": class_name(self.scaler), "values": given}

    def check_state_dict(self, state: Any) -> None:
        """Refuses a state that lacks values of an enabled scaler, or has others."""
        live, saved = self.scaler.state_dict(), state["values"]
        absent = [name for name in live if name not in saved] if saved else []
        refuse(
            self.key,
            [Mismatch(name, "not in the checkpoint", "a value, as in this run") for name in absent]
            or ([*_scale_mismatches(saved, live)] if live and saved else []),
            remedy=f"Pass exclude={{{self.key!r}}} to start with a fresh scaler",
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Restores all values; reports a scaler that is enabled on one side only."""
        saved, live = state["values"], self.scaler.state_dict()
        if live and not saved:
            return self.start_fresh()
        if saved and not live:
            return ("the checkpoint has a scaler, but this run's is disabled: its state is unused",)
        self.scaler.load_state_dict(saved)
        return ()

    def start_fresh(self) -> tuple[str, ...]:
        """The live scaler keeps its initial state."""
        if not self.scaler.state_dict():
            return ()
        return ("the checkpoint was written without a gradient scaler: this one starts afresh",)

    def fingerprint(self) -> dict[str, Any]:
        """The class, and whether it is enabled."""
        return {"class": class_name(self.scaler), "enabled": bool(self.scaler.state_dict())}


# ---------------------------------------------------------------- extras and attributes

_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray),
    *(Tensor, np.ndarray, np.generic),
)


class _OptionalExtras(TypedDict, total=False):
    devices: dict[str, str]


class _ExtrasState(_OptionalExtras):
    values: dict[Any, Any]
    objects: dict[Any, Any]


class Extras(Checked):
    """The state of a live dict: plain values, and objects with ``state_dict``.

    Objects, and lists, dicts, sets, deques, bytearrays and tensors that can hold the saved value,
    are restored in place, because other code may refer to them. Other values are replaced under
    their key; a value that only the checkpoint has is added. A new tensor is on the device that the
    saved one was on, or on the CPU where this process has none of that type.

    Args:
        live: the user's dict, read at each save and written at a load.
        key: the component's key, for errors.
    """

    schema = _ExtrasState

    def __init__(self, live: dict[Any, Any], *, key: str = "extras") -> None:
        self.live = live
        self.key = key

    def live_objects(self) -> tuple[Any, ...]:
        return (self.live, *self.live.values())

    def state_dict(self) -> dict[str, Any]:
        """The values themselves and the objects' states, not copies."""
        state: dict[str, Any] = {
            "values": {k: v for k, v in self.live.items() if not isinstance(v, Stateful)},
            "objects": {k: v.state_dict() for k, v in self.live.items() if isinstance(v, Stateful)},
        }
        devices = {
            str(path): _device_name(leaf.device)
            for path, leaf in leaves_of(state, StatePath(self.key))
            if isinstance(leaf, Tensor) and not leaf.is_cpu
        }
        return {**state, "devices": devices} if devices else state

    def check_state_dict(self, state: Any) -> None:
        """Refuses a key that is an object on one side only; asks each object's own method.

        A new value that no save could store is refused as well.
        """
        mismatches = []
        for name, saved in state["objects"].items():
            live = self.live.get(name)
            if not isinstance(live, Stateful):
                found = describe(live) if name in self.live else "nothing"
                mismatches.append(
                    Mismatch(repr(name), "the state of an object in the checkpoint", found)
                )
            elif isinstance(live, ComponentState):
                live.check_state_dict(saved)
            else:
                require_loadable(f"{self.key}: {name!r}", live, saved)
        for name, live in self.live.items():
            if isinstance(live, Stateful) and name not in state["objects"]:
                found = "a plain value" if name in state["values"] else "not in the checkpoint"
                mismatches.append(
                    Mismatch(repr(name), found, f"the state of a {type(live).__name__}")
                )
        remedy = 'Give extras the same objects as before, or pass exclude={"extras"}'
        refuse(self.key, mismatches, remedy=remedy)
        kept = {name: live for name, live in self.live.items() if name not in state["values"]}
        encode_local(self.key, {k: v for k, v in kept.items() if not isinstance(v, Stateful)})

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Restores every value and object; reports values that the checkpoint lacks."""
        devices = {
            id(leaf): _device_here(str(state["devices"][str(path)]))
            for path, leaf in leaves_of(state, StatePath(self.key))
            if str(path) in state.get("devices", {})
        }

        def new_tensor(saved: Tensor) -> Tensor:
            return saved.detach().to(devices.get(id(saved), saved.device), copy=True)

        restore = partial(Restorer(), new_tensor=new_tensor)
        for name, saved in state["objects"].items():
            with live_load(f"{self.key}: {name!r}"):
                self.live[name].load_state_dict(restore(None, saved))
        for name, saved in state["values"].items():
            self.live[name] = _replaced(restore, self.live.get(name), saved)
        return tuple(
            f"{name!r} is not in the checkpoint and keeps its value"
            for name, value in self.live.items()
            if name not in state["values"] and not isinstance(value, Stateful)
        )


def _device_name(device: torch.device) -> str:
    """The device's type, with its index unless it is the device that this process uses."""
    # Not always with the index: another rank, which uses another one, may load the value.
    used = torch.accelerator.current_accelerator()
    is_other = used is None or device.type != used.type
    is_current = is_other or device.index == torch.accelerator.current_device_index()
    return device.type if is_current else str(device)


def _device_here(name: str) -> torch.device:
    """The device of a saved name; the CPU where this process has none of that type."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind, _, index = name.partition(":")
    if found is None or kind != found.type:
        return torch.device("cpu")
    is_there = index.isdecimal() and int(index) < torch.accelerator.device_count()
    return torch.device(kind, int(index)) if is_there else torch.device(kind)


def _replaced(restore: Callable[[Any, Any], Any], live: Any, saved: Any) -> Any:
    """The saved value, in the live container if it has the same type."""
    if isinstance(saved, Tensor):
        return restore(live if isinstance(live, Tensor) else None, saved)
    value = restore(None, saved)
    if type(live) is not type(saved) or not isinstance(live, (dict, set, list, deque, bytearray)):
        return value
    live.clear()
    if isinstance(live, (dict, set)):
        live.update(value)
    else:
        live.extend(value)
    return live


class AttributeState(Checked):
    """Named attributes of one object of a framework: counters, flags, sums.

    Args:
        given: the object; its attributes can be set.
        names: of the attributes, which are plain values or tensors.
        key: the component's key, for errors.
    """

    schema: ClassVar[Any] = dict[str, Any]

    def __init__(self, given: Any, names: Iterable[str], *, key: str) -> None:
        self._given = given
        self._names = tuple(names)
        self.key = key

    def live_objects(self) -> tuple[Any, ...]:
        return (self._given,)

    def state_dict(self) -> dict[str, Any]:
        """The live values, not copies."""
        return {name: getattr(self._given, name) for name in self._names}

    def check_state_dict(self, state: Any) -> None:
        """Refuses a state that lacks an attribute, or has another kind of value."""
        missing = [name for name in self._names if name not in state]
        if missing:
            raise StateMismatchError(
                self.key,
                found=f"the checkpoint has no {', '.join(missing)}",
                expected=", ".join(self._names),
                remedy="Resume with the version of the framework that wrote the checkpoint",
            )
        # What has a value at first may have none later.
        live = {n: each for n, each in self.state_dict().items() if state.get(n) is not None}
        refuse(self.key, [*structure_mismatches(state, live, may_lack=True)], remedy=_REMEDY)

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Sets every attribute; a tensor is moved to the device of the one that it replaces."""
        for name in self._names:
            live, value = getattr(self._given, name), state[name]
            if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor):
                value = value.to(live.device)
            setattr(self._given, name, value)
        return ()


class Known(NamedTuple):
    """A stored object: the name of its class, and its content."""

    kind: str
    content: Any


class KnownObjects:
    """Converts objects of known classes in a nested state to plain values and back.

    A framework's state is meant for pickle, which may name any class. Here only the given classes,
    ``torch.Size`` and ``torch.dtype`` are allowed: an enum is stored as its value, another object
    as its attributes, and no code of its class runs.

    Args:
        *kinds: the classes, with distinct ``__name__``.
    """

    def __init__(self, *kinds: type) -> None:
        self._kinds = {kind.__name__: kind for kind in (*kinds, torch.Size, torch.dtype)}

    def plain(self, value: Any, *, where: str) -> Any:
        """Converts every object; tensors keep their identity, mappings become dicts.

        Args:
            value: dicts, lists, tuples, plain values, tensors, arrays and known objects.
            where: the value's name in an error.

        Raises:
            UnsupportedValueError: an object of another class.
        """
        if self._kinds.get(type(value).__name__) is type(value):
            return Known(type(value).__name__, self.plain(_content(value), where=where))
        if isinstance(value, Mapping):
            return {key: self.plain(each, where=f"{where}[{key!r}]") for key, each in value.items()}
        if type(value) in (list, tuple):
            items = enumerate(value)
            return type(value)(self.plain(each, where=f"{where}[{i}]") for i, each in items)
        if isinstance(value, Enum) or not isinstance(value, _PLAIN):
            raise UnsupportedValueError(
                where,
                found=f"an object of class {class_name(value)}",
                expected=f"plain values, tensors, or one of {', '.join(sorted(self._kinds))}",
            )
        return value

    def live(self, value: Any) -> Any:
        """The inverse of ``plain``, also of a value that was stored and read.

        Raises:
            StateMismatchError: an object of a class that is not known here.
        """
        if isinstance(value, dict):
            return {key: self.live(each) for key, each in value.items()}
        if getattr(value, "_fields", None) == Known._fields:
            if value.kind not in self._kinds:
                raise StateMismatchError(
                    "the checkpoint",
                    found=f"an object of class {value.kind}",
                    expected=f"one of {', '.join(sorted(self._kinds))}",
                )
            return _made(self._kinds[value.kind], self.live(value.content))
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.live, value))
        return value


def _content(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.Size):
        return list(value)
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else vars(value)


def _made(kind: type, content: Any) -> Any:
    if kind is torch.dtype:
        dtypes = (each for each in vars(torch).values() if isinstance(each, torch.dtype))
        return {str(each).removeprefix("torch."): each for each in dtypes}[content]
    if issubclass(kind, (Enum, torch.Size)):
        return kind(content)
    made = object.__new__(kind)
    vars(made).update(content)
    return made
