"""User state of a checkpoint back into the live objects; see ``encoding`` for the table."""

from __future__ import annotations

import copy
import ctypes
import functools
import operator
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from resumekit.capture.nested_state import (
    Restorer,
    class_name,
    describe,
    fits,
    is_same_class,
    live_load,
)
from resumekit.capture.rng import new_generator, set_generator_state
from resumekit.capture.user_state.attributes import Role, ValueSlot
from resumekit.capture.user_state.digests import gradient_of, reduced
from resumekit.capture.user_state.encoding import (
    LiveClasses,
    can_be_made,
    maker_of,
    module_of,
)
from resumekit.capture.user_state.memory import (
    Layout,
    SharedMemory,
    fill_memory,
    is_same_memory,
)
from resumekit.capture.user_state.table import NODE_MAPPINGS, NODE_SEQUENCES, read_nodes
from resumekit.capture.user_state.value_types import (
    CONSTANTS,
    FACTORIES,
    MAPPINGS,
    NAMED,
    SEQUENCES,
    Absent,
    Kind,
    class_of,
    is_namedtuple,
    kind_of,
    memory_of,
    parts_in,
    parts_of_call,
    parts_of_tensor,
    sort_of,
)
from resumekit.capture.user_state.walk import Walk
from resumekit.errors import StateMismatchError

_PARTIAL = functools.partial(print)
_NEW_OBJECT: Any = object().__reduce_ex__(4)[0]
_ABSENT = ["constant", Absent.__name__]

# The nodes that may replace a live value of these kinds.
_REPLACEABLE_BY: dict[Kind, tuple[str, ...]] = {
    Kind.GENERATOR: ("generator",),
    Kind.STATEFUL: ("stateful", "object", "new", "elsewhere"),
    Kind.MODULE: ("object", "new", "copy", "elsewhere"),
    Kind.CALL: ("call", "named"),
    Kind.SHARED: ("shared",),
    Kind.FUNCTION: (),
    Kind.CLASS: (),
    Kind.NAMED: (),
}


def label_of(entry: Sequence[Any]) -> str:
    """The path of a saved slot."""
    owner, role, name, _ = entry
    return ValueSlot(None, Role(role), name).label(owner)


class NodeDecoder:
    """Makes live values of encoded ones, in the live objects where they can hold them.

    Nothing live changes before ``run``: what is to be done is collected first.

    Args:
        where: what errors call the state.
        saved: the state; what live values of other paths than its own refer to is not filled, but
            for what another user state has saved as well.
        walk: of the live objects.
        device: where tensors are made that were on a device.

    Raises:
        StateMismatchError: the table of the state is malformed.
    """

    def __init__(
        self, where: str, saved: Mapping[str, Any], walk: Walk, device: torch.device | None
    ) -> None:
        self._where = where
        filled = {label_of(entry): entry[3] for entry in saved["slots"]}
        self._nodes, self._data = read_nodes(where, saved, filled.values())
        self._twice: Collection[int] = saved.get("twice", ())
        self._walk = walk
        self._device = device
        self._classes = LiveClasses((*walk.objects.values(), *walk.foreign.modules))
        self._made: dict[int, Any] = {}
        self.objects: dict[str, Any] = {}  # that no launch makes, by their path in the checkpoint
        layouts: Iterable[Layout] = saved.get("sharing", ())
        self._memory = SharedMemory(where, layouts, self._data, walk.seen, walk.clusters, filled)
        self._loads, self._actions = list[Callable[[], Any]](), list[Callable[[], Any]]()
        self._assigned: list[tuple[ValueSlot, Any]] = []
        kept = (e.value for path, e in walk.seen.items() if e.is_known and path not in filled)
        # Live objects that no node may fill, by id, and those that one fills.
        self._kept = {id(part): part for each in kept for part in parts_in(each)}
        self._taken: dict[int, Any] = {}

    def load_states(self) -> bool:
        """Calls ``load_state_dict`` of the objects that are saved by their state, if any are."""
        with live_load(self._where):
            for load in self._loads:
                load()
        return bool(self._loads)

    def run(self) -> None:
        """Changes the live objects, apart from what ``load_states`` does.

        Raises:
            StateMismatchError: an object does not keep a value that was assigned to it.
        """
        with live_load(self._where):
            for action in self._actions:
                action()
        for slot, value in self._assigned:
            slot.set(value)
            if not isinstance(value, Absent):
                self._read_back(slot, value)

    def restore(self, slot: ValueSlot, encoded: Any, path: str) -> None:
        """Adds a slot that ``run`` sets to an encoded value.

        Raises:
            StateMismatchError: the live value cannot hold it, or an object that it needs is absent.
        """
        present = self._walk.seen.get(path)
        live = None if present is None else present.value
        self._require_compatible(path, encoded, live)
        parts = parts_in(live) if isinstance(encoded, list) else ()
        self._named_parts = {sort_of(each): each for each in parts if kind_of(each) in NAMED}
        try:
            value = self.value(encoded, live, path)
            is_right = slot.role is not Role.MODULES or self._are_modules(encoded)
        except StateMismatchError:
            raise
        except Exception as error:
            raise self._mismatch(path, f"not a value of a table ({error!r:.80})", "one") from error
        if not is_right:
            raise self._mismatch(path, "other names and values", "the modules of a list")
        self.assign(slot, value)

    def _are_modules(self, encoded: Any) -> bool:
        """Whether it is a dict of modules by their numbers."""
        node = self._nodes[encoded[0]] if isinstance(encoded, list) else [""]
        return (
            node[0] == "dict"
            and all(isinstance(key, str) and key.isdecimal() for key in node[1])
            and all(isinstance(self.value(e, None, ""), nn.Module) for e in self._items(node[2]))
        )

    def assign(self, slot: ValueSlot, value: Any) -> None:
        """Adds a slot that ``run`` sets to a live value, when the objects are filled."""
        self._assigned.append((slot, value))

    def _require_compatible(self, path: str, encoded: Any, live: Any) -> None:
        node = self._nodes[encoded[0]] if isinstance(encoded, list) else ["a plain value"]
        if node[:2] == _ABSENT:
            return
        saved, kind = node[0], kind_of(live)
        if (kind in _REPLACEABLE_BY and saved not in _REPLACEABLE_BY[kind]) or (
            kind is Kind.LEAF and saved not in ("tensor", "live", "elsewhere")
        ):
            expected = f"what can hold {saved}, as when the checkpoint was written"
            raise self._mismatch(path, describe(live), expected)

    def _read_back(self, slot: ValueSlot, value: Any) -> None:
        if slot.role in (Role.ITEMS, Role.EXTRA_STATE, Role.OPTIMIZER, Role.DEFAULTS):
            return
        now = slot.get()
        if now is not value and not (type(now) is type(value) and repr(now) == repr(value)):
            raise StateMismatchError(
                f"{self._where}: {slot.name}", found=describe(now), expected=describe(value)
            )

    def value(self, encoded: Any, live: Any, path: str) -> Any:
        """The value to be put where ``live`` is.

        Raises:
            StateMismatchError: a live object that it needs is not there.
        """
        if not isinstance(encoded, list):
            return encoded
        index = encoded[0]
        if index not in self._made:
            if index in self._twice:
                self._kept.pop(id(live), None)
            self._made[index] = self._node(index, self._nodes[index], live, path)
        return self._made[index]

    def _node(self, index: int, node: Sequence[Any], live: Any, path: str) -> Any:
        kind = node[0]
        if kind in NODE_SEQUENCES or kind == "namedtuple":
            return self._sequence(index, node, live, path)
        if kind in NODE_MAPPINGS:
            return self._mapping(index, node, live, path)
        if kind in ("object", "new", "copy"):
            return self._object(index, node, live, path)
        try:
            return self._makers.get(kind, NodeDecoder._constant)(self, node, live, path)
        except (ArithmeticError, TypeError, ValueError) as error:  # of a constructor
            raise self._mismatch(path, f"{kind}: {error}", "what was saved") from error

    def _live(self, node: Sequence[Any], live: Any, path: str) -> Any:
        if live is None:
            raise self._mismatch(path, "nothing", "the object that this launch makes")
        return live

    def _elsewhere(self, node: Sequence[Any], live: Any, path: str) -> Any:
        """An object of another component."""
        found = self._walk.foreign.named(node[1])
        if found is None or not _is(found, node[2]):
            raise self._mismatch(path, describe(found), f"{node[1]!r:.60}, a {node[2]!s:.60}")
        return found

    def _named(self, node: Sequence[Any], live: Any, path: str) -> Any:
        """What has this name, among all that the live value is made of."""
        found = self._named_parts.get(node[1])
        if found is None and sort_of(live).partition(" ")[0] == node[1].partition(" ")[0]:
            found = live  # the code of a library may be another than it was
        if found is None or kind_of(found) not in NAMED:
            raise self._mismatch(path, describe(live), f"the live {node[1]!r:.60}")
        return found

    def _constant(self, node: Sequence[Any], live: Any, path: str) -> Any:
        kind, content = node[0], node[1]
        if kind == "constant" and content in CONSTANTS:
            return CONSTANTS[content](*(self.value(e, None, path) for e in self._items(node[2])))
        if kind == "data":
            return self._data[content]
        if kind == "size":
            return torch.Size(content)
        if kind == "device":
            return torch.device(content)
        if kind == "dtype":
            found = getattr(torch, content, None)
            if isinstance(found, torch.dtype):
                return found
        elif kind == "enum":
            known = type(live) if isinstance(live, Enum) else self._classes.get(content)
            if known is not None and issubclass(known, Enum) and node[2] in known.__members__:
                return known[node[2]]
        raise self._mismatch(path, f"no {kind} {content!r:.60} in this program", "one")

    def _sequence(self, index: int, node: Sequence[Any], live: Any, path: str) -> Any:
        kind = node[0]
        if kind == "namedtuple":
            return self._namedtuple(node, live, path)
        maker, encoded = NODE_SEQUENCES[kind], self._items(node[1])
        is_same = type(live) is maker
        partners = live if is_same and kind in ("list", "tuple", "deque") else ()
        pairs = list(partners) + [None] * (len(encoded) - len(partners))
        made: Any = None
        if kind in ("list", "deque"):
            keeps = is_same and getattr(live, "maxlen", None) == node[2] and self._take(live)
            made = live if keeps else ([] if kind == "list" else deque(maxlen=node[2]))
            self._made[index] = made
        values = [
            self.value(each, partner, f"{path}[{number}]")
            for number, (each, partner) in enumerate(zip(encoded, pairs, strict=False))
        ]
        if made is None:
            return maker(values)
        self._actions.append(lambda: (made.clear(), made.extend(values)))
        return made

    def _items(self, field: Any) -> Any:
        """The references of a node, or its numbers."""
        return self._data[field] if type(field) is int else field

    def _values(self, encoded: Any, partners: Iterable[Any], path: str) -> Iterator[Any]:
        """The values of some references, each to be put where its partner is."""
        pairs = zip(encoded, partners, strict=True)
        return (self.value(each, partner, path) for each, partner in pairs)

    def _namedtuple(self, node: Sequence[Any], live: Any, path: str) -> Any:
        name, fields, encoded = node[1], node[2], self._items(node[3])
        is_same = is_namedtuple(class_of(live)) and _is(live, name)
        known = type(live) if is_same else self._classes.get(name)
        if known is None or list(getattr(known, "_fields", ())) != fields:
            expected = f"the namedtuple {name} with the fields {', '.join(map(str, fields))}"
            raise self._mismatch(path, "no such class in this program", expected)
        partners: Any = live if type(live) is known else [None] * len(fields)
        values = [
            self.value(each, partner, f"{path}.{field}")
            for each, partner, field in zip(encoded, partners, fields, strict=True)
        ]
        return known._make(values)  # type: ignore[attr-defined]

    def _mapping(self, index: int, node: Sequence[Any], live: Any, path: str) -> Any:
        kind, keys, encoded, factory = node[0], node[1], self._items(node[2]), None
        maker = NODE_MAPPINGS[kind]
        if node[3] is not None:
            present = getattr(live, "default_factory", None)
            factory = FACTORIES.get(node[3]) or self._classes.get(node[3])
            factory = factory or self._named(["named", node[3]], present, path)
        made = live
        if type(live) is not maker or not self._take(live):
            made = maker()
        self._made[index] = made
        partners = live if isinstance(live, dict) else {}
        values = {}
        for key, each in zip(keys, encoded, strict=True):
            decoded = self.value(key, None, path)
            values[decoded] = self.value(each, partners.get(decoded), f"{path}[{decoded!r}]")
        self._actions.append(lambda: (made.clear(), made.update(values)))
        if kind == "defaultdict":
            self._actions.append(lambda: setattr(made, "default_factory", factory))
        return made

    def _object(self, index: int, node: Sequence[Any], live: Any, path: str) -> Any:
        saved_path, name = node[1], node[2]
        there = self._walk.objects.get(saved_path)
        there = self._walk.wrappers.get((saved_path, name), there)
        if there is not None and _is(there, name):
            made = there
        elif node[0] == "object":
            raise self._mismatch(saved_path, describe(there), f"the {name} that this launch makes")
        else:
            kind = self._classes.get(name)
            if kind is None or not can_be_made(kind):
                raise self._mismatch(path, "no such class in this program", name)
            made = object.__new__(kind) if node[0] == "new" else self._copy_of(name, path)
        self._made[index] = made
        if node[0] != "object":
            self.objects[saved_path] = made
            for key, each in node[3].items():
                role, _, attribute = key.partition(":")
                slot = ValueSlot(made, Role(role), attribute)
                present = self._walk.seen.get(slot.label(saved_path)) if made is there else None
                value = self.value(each, present and present.value, slot.label(saved_path))
                self._actions.append(functools.partial(slot.set, value))
        return made

    def _copy_of(self, name: str, path: str) -> Any:
        """A copy of a live module of a class."""
        twin = module_of(name, self._walk, self._walk.objects)
        try:
            return copy.deepcopy(twin)
        except Exception as error:  # the user's __deepcopy__ raises anything
            raise self._mismatch(path, f"no copy of {name}: {error}", "one") from error

    def _code(self, node: Sequence[Any], live: Any, path: str) -> Any:
        """What a live object is made by, or a class that may make one."""
        found = self._walk.makers.get(node[1]) or maker_of(node[1], self._classes)
        if found is None:
            raise self._mismatch(path, f"no live object that {node[1]!r:.60} makes", "one")
        return found

    def _reduced(self, node: Sequence[Any], live: Any, path: str) -> Any:
        """An object with hidden state: the live one if it takes a state, else a new one."""
        name, maker = node[1], self._code(["code", node[2]], live, path)
        actions, self._actions = self._actions, []  # a new object is made of what is complete
        arguments, state, items, pairs = (self.value(each, None, path) for each in node[3])
        for action in self._actions:
            action()
        self._actions = actions
        keeps = maker is _NEW_OBJECT and hasattr(type(live), "__setstate__")
        if keeps and _is(live, name) and not items and not pairs and self._take(live):
            self._actions.append(lambda: live.__setstate__(state))
            return live
        keeps = maker is type(live) and _builtin_base(live) is not maker and hasattr(maker, "clear")
        if keeps and reduced(live)[1] == arguments and self._take(live):
            self._actions.append(lambda: _refill(live, state, items or (), pairs or ()))
            return live
        try:
            made = maker(*arguments)
            _set_content(made, state, items or (), pairs or ())
        except Exception as error:  # of a library's class
            raise self._mismatch(path, f"{name}: {error}", "what was saved") from error
        if not _is(made, name):
            raise self._mismatch(path, describe(made), f"a {name}")
        return made

    def _call(self, node: Sequence[Any], live: Any, path: str) -> Any:
        """The live method, or a partial of a function that the live value has."""
        encoded, is_partial = self._items(node[2]), node[1] == class_name(_PARTIAL)
        partners = parts_of_call(live if _is(live, node[1]) or not is_partial else _PARTIAL)
        if len(partners) != len(encoded):
            raise self._mismatch(path, describe(live), f"the {node[1]} that this launch makes")
        parts = [*self._values(encoded, partners, path)]
        if all(part is partner for part, partner in zip(parts, partners, strict=True)):
            return live
        if is_partial and any(parts[0] is each for each in self._named_parts.values()):
            keywords = dict(zip(parts[2], parts[3], strict=True))
            return functools.partial(parts[0], *parts[1], **keywords)
        raise self._mismatch(path, f"{describe(live)} of another object", "the same object")

    def _tensor(self, node: Sequence[Any], live: Any, path: str) -> Any:
        made = self._elements(node, live)
        former = gradient_of(live) if made is live else None
        grad: Any = None
        for each in node[4]:
            is_one = isinstance(each, list) and self._nodes[each[0]][4:] == [[]]
            grad = self.value(each, former, f"{path}.grad") if is_one else each
            if not fits(grad, made) or grad.device != made.device or not made.is_leaf:
                raise self._mismatch(path, f"a gradient that is {describe(grad)}", describe(made))
        if grad is not former:
            self._actions.append(lambda: setattr(made, "grad", grad))
        return made

    def _elements(self, node: Sequence[Any], live: Any) -> Any:
        """The live tensor that is filled, or a new one."""
        saved, was_on_device, requires_grad = self._data[node[1]], node[2], node[3]
        is_like = fits(live, saved) and live not in self._walk.foreign and live.grad_fn is None
        device = live.device if isinstance(live, torch.Tensor) else self._device
        device = device if was_on_device or isinstance(live, torch.Tensor) else None
        location = self._memory.locate(node[1], live, device)
        if is_like and self._is_filled(live, location, saved):
            return live
        if location is None:
            made = saved.detach().clone().to(device)
        else:
            made = location
            self._actions.append(lambda: fill_memory(location, saved))
        if is_like and isinstance(live, nn.Parameter) and self._take(live):
            self._actions.append(lambda: setattr(live, "data", made))
            return live
        if isinstance(live, torch.Tensor) and node[0] == "tensor" and type(made) is not type(live):
            made = made.as_subclass(type(live))
        if node[0] == "parameter" and not isinstance(made, nn.Parameter):
            return nn.Parameter(made, requires_grad and made.is_floating_point())
        return made.requires_grad_() if requires_grad and made.is_floating_point() else made

    def _parts(self, node: Sequence[Any], live: Any, path: str) -> Any:
        """A tensor that wraps others: the live one, with theirs filled."""
        partners = parts_of_tensor(live) if _is(live, node[1]) else []
        encoded = self._items(node[2])
        if len(partners) != len(encoded):
            raise self._mismatch(path, describe(live), f"the {node[1]} that this launch makes")
        for made, partner in zip(self._values(encoded, partners, path), partners, strict=True):
            if made is not partner:
                raise self._mismatch(path, describe(partner), describe(made))
        return live

    def _is_filled(self, live: Any, location: Any, saved: Any) -> bool:
        """Whether a live tensor or array is filled, which changes none that is not restored."""
        is_right = (
            self._memory.is_alone(live) if location is None else is_same_memory(live, location)
        )
        if not is_right or not self._take(live):
            return False
        self._actions.append(lambda: fill_memory(live, saved))
        return True

    def _buffer(self, node: Sequence[Any], live: Any, path: str) -> Any:
        typecode, content = node[1], self._data[node[2]]
        made: Any = array(typecode, content) if typecode else bytearray(content)
        is_like = type(live) is type(made) and getattr(live, "typecode", "") == typecode
        if not (is_like and self._take(live)):
            return made
        self._actions.append(lambda: operator.setitem(live, slice(None), made))
        return live

    def _shared(self, node: Sequence[Any], live: Any, path: str) -> Any:
        name, content = node[1], self._data[node[2]]
        is_right = kind_of(live) is Kind.SHARED and _is(live, name)
        if not is_right or len(bytes(memory_of(live))) != len(content):
            raise self._mismatch(path, describe(live), f"the {name} whose content was saved")
        address = ctypes.addressof(memory_of(live))
        self._actions.append(lambda: ctypes.memmove(address, content, len(content)))
        return live

    def _objects(self, node: Sequence[Any], live: Any, path: str) -> Any:
        """An array of objects: the live one if the shape is the same."""
        shape, items = node[1], self._items(node[2])
        keeps = type(live) is np.ndarray and live.dtype == object and list(live.shape) == shape
        keeps = keeps and live.flags.writeable and self._take(live)
        made = live if keeps else np.empty(shape, object)
        values = [*self._values(items, made.flat if keeps else [None] * made.size, path)]

        def fill_in() -> None:
            for index, value in zip(np.ndindex(*shape), values, strict=True):
                made[index] = value

        self._actions.append(fill_in)
        return made

    def _array(self, node: Sequence[Any], live: Any, path: str) -> Any:
        saved, location = self._data[node[1]], self._memory.locate(node[1], live, None)
        sort = saved.dtype, saved.shape
        is_like = type(live) is np.ndarray and (live.dtype, live.shape) == sort
        if is_like and live.flags.writeable and self._is_filled(live, location, saved):
            return live
        if location is None:
            return saved.copy()
        self._actions.append(lambda: fill_memory(location, saved))
        return location

    def _in_place(self, node: Sequence[Any], live: Any, path: str) -> Any:
        kind, name, state = *node[:2], self._data[node[2]]
        if kind == "generator" and kind_of(live) not in (Kind.GENERATOR, Kind.CONTAINER):
            live = new_generator(name, state)  # as of an environment that is reset in the loop
        is_state = kind == "stateful"
        expected = Kind.STATEFUL if is_state else Kind.GENERATOR
        if live is None or kind_of(live) is not expected or not _is(live, name):
            raise self._mismatch(path, describe(live), f"the {name} whose state was saved")
        load = live.load_state_dict if is_state else functools.partial(set_generator_state, live)
        actions = self._loads if is_state else self._actions
        actions.append(functools.partial(load, Restorer()(None, state)))
        return live

    def _take(self, live: Any) -> bool:
        """Whether it may be filled: what two nodes fill, or another value keeps, is two again."""
        if id(live) in self._kept or id(live) in self._taken:
            return False
        self._taken[id(live)] = live
        return True

    def _mismatch(self, path: str, found: str, expected: str) -> StateMismatchError:
        return StateMismatchError(
            f"{self._where}: {path}",
            found=found,
            expected=expected,
            remedy="Create it in __init__ or before the first step",
        )

    # What makes the value of each kind of node, constants and what may be in a cycle apart.
    _makers: ClassVar[dict[str, Callable[[NodeDecoder, Sequence[Any], Any, str], Any]]] = {
        "call": _call,
        "live": _live,
        "named": _named,
        "elsewhere": _elsewhere,
        "parts": _parts,
        "array": _array,
        "buffer": _buffer,
        "shared": _shared,
        "objects": _objects,
        "code": _code,
        "reduced": _reduced,
        **dict.fromkeys(("tensor", "parameter"), _tensor),
        **dict.fromkeys(("generator", "stateful"), _in_place),
    }


def _refill(live: Any, state: Any, items: Iterable[Any], pairs: Iterable[Any]) -> None:
    """Gives a live object other content; what makes a new one would have the same arguments."""
    _builtin_base(live).clear(live)
    if state is not None:
        getattr(live, "__dict__", {}).clear()
    _set_content(live, state, items, pairs)


def _set_content(made: Any, state: Any, items: Iterable[Any], pairs: Iterable[Any]) -> None:
    """Gives a new object its content, as ``copy.copy`` does; skips the user's ``__setitem__``."""
    base = _builtin_base(made)
    if state is not None and hasattr(made, "__setstate__"):
        made.__setstate__(state)
    elif state is not None:
        attributes, slots = state if isinstance(state, tuple) else (state, {})
        vars(made).update(attributes or {})
        for name, value in slots.items():
            setattr(made, name, value)
    for each in items:
        base.append(made, each)
    for key, value in pairs:
        base.__setitem__(made, key, value)


def _builtin_base(value: Any) -> Any:
    """The container that the class of an object is derived from; the class where it is of none."""
    kinds = type(value).__mro__
    return next((each for each in kinds if each in (*SEQUENCES, *MAPPINGS)), kinds[0])


def device_of(objects: Iterable[Any]) -> torch.device | None:
    """The device of the first parameter or buffer of a model; without one, the accelerator's."""
    modules = (each for each in objects if isinstance(each, nn.Module))
    tensors = (t for m in modules for group in (m.parameters(), m.buffers()) for t in group)
    first = next(tensors, None)
    if first is not None:
        return first.device
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _is(value: Any, name: str) -> bool:
    return is_same_class(name, class_name(value))
