"""User state as values that a checkpoint can hold, and back into the live objects.

Every container, tensor, array and object becomes a node of one flat table, and a value that refers
to it is ``[index]``: aliases and cycles stay what they were. What JSON has stands for itself. The
table is one text: thousands of nodes take milliseconds. What is no text, as a tensor, is in a list
next to it, and the node has its index. See ``LiveClasses`` for the classes that it may name.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from enum import Enum
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from resumekit.capture.nested_state import class_name, describe, fits, is_same_class
from resumekit.capture.rng import generator_state, new_generator
from resumekit.capture.user_state.attributes import OF_TORCH, Role, ValueSlot, without_wrappers
from resumekit.capture.user_state.digests import (
    MAX_DEPTH,
    TOO_DEEP,
    UncapturedError,
    global_name,
    gradient_of,
    reduced,
)
from resumekit.capture.user_state.exclusions import is_secret
from resumekit.capture.user_state.value_types import (
    CODE,
    FACTORIES,
    MAPPINGS,
    NAMED,
    SCALARS,
    TORCH_CONSTANTS,
    WEAK,
    Kind,
    cache_size,
    class_of,
    factory_of,
    is_library,
    is_namedtuple,
    is_user_object,
    items_of,
    kind_of,
    kind_of_class,
    memory_of,
    parts_of_call,
    parts_of_tensor,
    sort_of,
    takes,
    wraps_others,
)
from resumekit.capture.user_state.walk import Seen, Walk
from resumekit.serialization.encoding import encode, has_surrogates

_MAX_INT = 1 << 63
_MAX_NUMBERS = 1024  # in the text; longer lists are next to it


class LiveClasses:
    """The classes of the running program that a checkpoint may name.

    They are those of live objects, and those that the modules of these classes define or import.

    Args:
        objects: the live objects.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects = objects

    @functools.cached_property
    def _by_name(self) -> dict[str, type]:
        found: dict[str, type] = {}
        for name in {_module_of(each): None for each in self._objects}:
            for value in vars(sys.modules.get(name, object)).values():
                if isinstance(value, type):
                    found.setdefault(class_name_of(value), value)
        for each in self._objects:
            if isinstance(each, type):
                found.setdefault(class_name_of(each), each)
        return found

    def get(self, name: str) -> type | None:
        """The class of this full name; None where no live object's module has one."""
        found = self._by_name.get(name)
        if found is None:
            found = next((k for n, k in self._by_name.items() if is_same_class(name, n)), None)
        return found


def maker_of(name: str, classes: LiveClasses) -> Any:
    """The class of this full name, if it has hidden state or is a builtin one; otherwise None.

    The constructors of other classes may do anything.
    """
    found = classes.get(name)
    has_hidden_state = found is not None and kind_of_class(found) is Kind.REDUCED
    return found if has_hidden_state else FACTORIES.get(name.removeprefix("builtins."))


def module_of(name: str, walk: Walk, known: Container[str]) -> nn.Module | None:
    """The first live module of a class, among those at known paths and those saved elsewhere."""
    modules = (each for path, each in walk.objects.items() if path in known)
    found = (each for each in chain(modules, walk.foreign.modules) if isinstance(each, nn.Module))
    return next((each for each in found if is_same_class(name, class_name(each))), None)


def _module_of(value: Any) -> str:
    owner = value if kind_of(value) in CODE else type(value)
    return str(value.get("__name__") if type(value) is dict else owner.__module__)


def class_name_of(kind: type) -> str:
    """The full dotted name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.cache
def can_be_made(kind: type) -> bool:
    """Whether an object of a class of the user's is its attributes: no code runs to make it.

    An optimizer, a schedule or a loader has more than is read of it.
    """
    maker: Any = kind.__new__
    is_plain = maker is object.__new__ and not hasattr(kind, "__del__")
    return is_plain and not issubclass(kind, OF_TORCH)


class NodeEncoder:
    """Encodes the values of slots into one table of nodes.

    Args:
        walk: of the live objects.
        known: the classes of the objects that each launch makes by itself, by path; all others are
            encoded as new ones, with their attributes.
    """

    def __init__(self, walk: Walk, known: Mapping[str, str]) -> None:
        self.nodes: list[list[Any]] = []
        self.data: list[Any] = []
        self._walk = walk
        self._known = known
        self._foreign = walk.foreign
        made = (each for path, each in walk.objects.items() if path in known)
        self._classes = LiveClasses((*made, *walk.foreign.modules))
        self.indices: dict[int, int] = {}  # of nodes, by the id of the value
        self.placed: dict[int, int] = {}  # the data of tensors and arrays, by the id of the value
        self._kept: list[Any] = []

    def encode(self, seen: Seen, first: Mapping[str, int]) -> Any:
        """The encoded value of a slot.

        Args:
            seen: the slot.
            first: how many objects of each sort it held at first, see ``Foreign.sorts_in``: as many
                are there in the next launch, which may fill them or take them as they are.

        Raises:
            UncapturedError: it cannot be stored.
        """
        self._left, self._has_makers, self._depth = Counter(first), False, 0
        if kind_of(seen.value) in (Kind.FUNCTION, Kind.CLASS, Kind.NAMED):
            raise UncapturedError(f"training changed it to {describe(seen.value)}")
        return self._whole(seen.value)

    def _whole(self, value: Any) -> Any:
        """The encoded value; nothing is left in the table where a part of it cannot be stored."""
        num_nodes, num_data, depth = len(self.nodes), len(self.data), self._depth
        try:
            return self._value(value)
        except Exception as error:  # of a class of the user's or of a library
            del self.nodes[num_nodes:], self.data[num_data:]
            self.indices = {k: v for k, v in self.indices.items() if v < num_nodes}
            self.placed = {k: v for k, v in self.placed.items() if v < num_data}
            self._depth = depth
            if isinstance(error, UncapturedError):
                raise
            raise UncapturedError.for_value(value, error) from error

    def _has_live(self, value: Any) -> bool:
        """Whether the next launch has an object for this one: each counts once."""
        sort = self._foreign.sort_of(value)
        self._left[sort] -= 1
        return self._left[sort] >= 0

    def _value(self, value: Any) -> Any:
        if _is_text(value):
            return value
        index = self.indices.get(id(value))
        if index is None:
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise UncapturedError(TOO_DEEP)
            index = self.indices[id(value)] = len(self.nodes)
            self.nodes.append([])
            name, make = self._foreign.name_of(value), self._makers.get(kind_of(value))
            if name is not None:
                self.nodes[index] = ["elsewhere", name, class_name(value)]
            elif make is not None:
                self.nodes[index] = make(self, value)
            else:
                raise _not_saved(value)
            self._depth -= 1
        return [index]

    def _next_to(self, value: Any) -> int:
        """The index of what is no text."""
        self.data.append(value)
        return len(self.data) - 1

    def _add(self, value: Any, data: Any) -> int:
        """The index of the elements of a tensor or an array, whose memory others may share."""
        cluster = self._walk.clusters.by_id.get(id(value))
        if wraps_others(value) or (cluster and not cluster.can_hold(value)):
            raise UncapturedError(f"{describe(value)} whose memory or .grad cannot be saved")
        self.placed[id(value)] = index = self._next_to(data)
        return index

    def _gradient(self, value: Any) -> list[Any]:
        grad = gradient_of(value)
        if grad is not None and not (fits(grad, value) and grad.is_leaf and grad.grad is None):
            raise UncapturedError(f"{describe(value)} whose .grad cannot be stored")
        return [] if grad is None else [self._value(grad)]

    def _array(self, value: Any) -> list[Any]:
        if value.dtype == object:
            return ["objects", list(value.shape), self._items(value.flat)]
        if value.dtype.hasobject:
            raise _not_saved(value)
        return ["array", self._add(value, value)]

    def _stateful(self, value: Any) -> list[Any]:
        if value in self._foreign:
            return self._live(value)
        if not self._has_live(value):
            return self._object(value)
        state = value.state_dict()
        encode(state, where="")  # raises where a part of it cannot be stored
        return ["stateful", class_name(value), self._next_to(state)]

    def _live(self, value: Any) -> list[Any]:
        if not self._has_live(value):
            raise _not_saved(value)
        return _as_it_is(value)

    def _tensor(self, value: Any) -> list[Any]:
        if value in self._foreign:
            if not self._has_live(value):
                raise UncapturedError(
                    f"{describe(value)} in it is memory of a model or an optimizer, not a copy"
                )
            return ["live"]
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            what = f"{value.layout}, {value.dtype}"
            raise UncapturedError(f"a {type(value).__name__} that cannot be stored ({what})")
        if type(value) not in (torch.Tensor, nn.Parameter) and not self._has_live(value):
            raise UncapturedError(f"{describe(value)} that training made")
        if wraps_others(value) and gradient_of(value) is None:
            parts = parts_of_tensor(value)
            self._kept.append(parts)
            return ["parts", class_name(value), self._items(parts)]
        is_on_device = value.device.type != "cpu"
        name = "parameter" if isinstance(value, nn.Parameter) else "tensor"
        location = self._add(value, value.detach().as_subclass(torch.Tensor))
        return [name, location, is_on_device, value.requires_grad, self._gradient(value)]

    def _generator(self, value: Any) -> list[Any]:
        name, state = class_name(value), generator_state(value)
        if not self._has_live(value) and new_generator(name, state) is None:
            raise UncapturedError(f"{describe(value)} that training made")
        return ["generator", name, self._next_to(state)]

    def _call(self, value: Any) -> list[Any]:
        if not (isinstance(value, functools.partial) or self._has_live(value)):
            raise _not_saved(value)
        if cache_size(value):
            raise UncapturedError("a cache of random values, which cannot be filled")
        parts = parts_of_call(value)
        self._kept.append(parts)
        if isinstance(value, functools.partial) and sort_of(value.func) not in self._left:
            raise UncapturedError(f"a partial of another function, {describe(value.func)}")
        return ["call", class_name(value), self._items(parts)] if parts else _as_it_is(value)

    def _reduced(self, value: Any) -> list[Any]:
        if class_of(value) in WEAK:
            raise _not_saved(value)
        parts = maker, *content = reduced(value)
        self._kept.append(parts)  # nodes are found by the ids of what they are made of
        has_live = self._has_live(value)
        if isinstance(maker, str) and has_live:
            return ["live"]
        if not (has_live or takes(maker, content[0])):
            raise UncapturedError(f"{describe(value)} whose class needs other arguments")
        before = self._left, self._has_makers
        # What makes the live one may make this one too, and the parts of it.
        self._left, self._has_makers = Counter(), has_live or self._has_makers
        try:
            name = self._maker(maker, value)
            encoded = [self._part(each, value) for each in content]
        finally:
            self._left, self._has_makers = before
        return ["reduced", class_name(value), name, encoded]

    def _maker(self, code: Any, value: Any) -> str:
        """The name of a function or a class that makes a value, where a resume finds it."""
        name = global_name(code)
        is_live = self._has_makers and self._walk.makers.get(name) is code
        if not is_live and maker_of(name, self._classes) is not code:
            raise UncapturedError(f"{describe(value)} that training made, and the script none")
        return name

    def _part(self, value: Any, owner: Any) -> Any:
        """A part of what makes an object, the owner, see ``Content``."""
        if type(value) is tuple:
            self.nodes.append(["tuple", [], None])
            index = len(self.nodes) - 1
            self.nodes[index][1] = [self._part(each, owner) for each in value]
            return [index]
        if global_name(value):
            self.nodes.append(["code", self._maker(value, owner)])
            return [len(self.nodes) - 1]
        return self._value(value)

    def _constant(self, value: Any) -> list[Any]:
        return ["constant", type(value).__name__, self._items(value.__reduce__()[1])]

    def _buffer(self, value: Any) -> list[Any]:
        return ["buffer", getattr(value, "typecode", ""), self._next_to(bytes(value))]

    def _shared(self, value: Any) -> list[Any]:
        if not self._has_live(value):
            raise _not_saved(value)
        return ["shared", class_name(value), self._next_to(bytes(memory_of(value)))]

    def _scalar(self, value: Any) -> list[Any]:
        if isinstance(value, Enum):
            if value.name not in type(value).__members__:  # several flags
                raise _not_saved(value)
            return ["enum", class_name(value), value.name]
        is_number = issubclass(class_of(value), np.generic) and not value.dtype.hasobject
        if is_number or type(value) in SCALARS:
            return ["data", self._next_to(value)]
        if type(value) not in TORCH_CONSTANTS:
            raise _not_saved(value)
        name = {torch.dtype: "dtype", torch.device: "device"}.get(type(value), "size")
        return [name, list(value) if name == "size" else str(value).removeprefix("torch.")]

    def _container(self, value: Any) -> list[Any]:
        kind: Any = type(value)
        if is_namedtuple(kind):
            name = class_name_of(kind)
            if self._classes.get(name) is not kind:
                raise UncapturedError(f"{describe(value)}, whose class no live object's module has")
            return ["namedtuple", name, list(value._fields), self._items(value)]
        name = kind.__name__
        if kind in MAPPINGS:
            items = [self._item(key, each) for key, each in value.items()]
            return [name, [self._key(k) for k in value], items, self._factory(value)]
        items = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return [name, self._items(items), getattr(value, "maxlen", None)]

    def _factory(self, value: Any) -> str | None:
        """The name of what a defaultdict makes values with."""
        factory = getattr(value, "default_factory", None)
        if factory is None or factory_of(value) is None:
            return factory and str(factory.__name__)
        if isinstance(factory, type) and self._classes.get(class_name_of(factory)) is factory:
            return class_name_of(factory)
        if not self._has_live(factory):
            raise UncapturedError(f"a defaultdict of {describe(factory)} that training made")
        return sort_of(factory)

    def _items(self, values: Iterable[Any]) -> list[Any] | int:
        items = list(values)
        if len(items) > _MAX_NUMBERS and {*map(type, items)} <= {int, float}:
            return self._next_to(items)
        return [each if _is_text(each) else self._value(each) for each in items]

    def _item(self, key: Any, value: Any) -> Any:
        if isinstance(key, str) and is_secret(key, value):
            raise UncapturedError(f"it holds {key!r}, which looks like a secret")
        return self._value(value)

    def _key(self, key: Any) -> Any:
        if _is_text(key):
            return key
        keys = key if type(key) is tuple else (key,)
        if not all(kind_of(each) is Kind.SCALAR for each in keys):
            raise UncapturedError(f"{describe(key)} as a key cannot be saved")
        return self._value(key)

    def _object(self, wrapped: Any) -> list[Any]:
        value, kind = without_wrappers(wrapped), kind_of(wrapped)
        path = self._walk.paths.get(id(value))
        name = class_name(value)
        if path is None:
            if self._has_live(value):
                return _as_it_is(value)
            raise UncapturedError(f"{describe(value)} in it is saved elsewhere")
        is_known = path in self._known and self._known[path] == sort_of(value)
        if is_known and not (kind in CODE and is_library(value)):
            return ["object", path, class_name(wrapped)]
        is_ours = self._classes.get(name) is type(value) and can_be_made(class_of(value))
        if not (is_user_object(value) and is_ours and wrapped is value):
            raise UncapturedError(f"{describe(value)} that training made and no launch can make")
        left, self._left = self._left, Counter()  # no launch has what it refers to
        made_by, attributes = "new", {}
        try:
            for slot, each in self._attributes_of(kind, value, path):
                try:
                    attributes[slot.role + ":" + slot.name] = self._whole(each)
                except UncapturedError:
                    if kind is not Kind.MODULE or not self._is_in_copies(value, slot.name):
                        raise
                    made_by = "copy"
        finally:
            self._left = left
        return [made_by, path, name, attributes]

    def _is_in_copies(self, module: nn.Module, name: str) -> bool:
        """Whether a copy of a live module of the class has such an attribute.

        Functions that belong to one object, as torchmetrics 1.9 metric.py ``_wrap_update`` makes
        them, and what is no state are made by no other means. All else has to be saved.
        """
        value, twin = vars(module)[name], module_of(class_name(module), self._walk, self._known)
        there = None if twin is None else vars(twin).get(name)
        if type(there) is not type(value):
            return False
        if kind_of(value) is Kind.CONTAINER:  # of functions: the same ones
            return [*map(id, items_of(value))] == [*map(id, items_of(there))]
        is_leaf = kind_of(value) is Kind.LEAF and not isinstance(value, torch.Tensor)
        return is_leaf or kind_of(value) in NAMED

    def _attributes_of(self, kind: Kind, value: Any, path: str) -> Iterator[tuple[ValueSlot, Any]]:
        """All that makes up a new object; of a module also what torch keeps in it."""
        if kind is Kind.MODULE:
            for name, each in vars(value).items():
                if is_secret(name, each):
                    raise UncapturedError(f"it holds {name!r}, which looks like a secret")
                yield ValueSlot(value, Role.ATTRIBUTE, name), each
            return
        for seen in self._walk.by_owner[path]:
            if seen.is_ignored or seen.problem:
                raise UncapturedError(f"{seen.slot.label(path)} in it cannot be saved")
            yield seen.slot, seen.value

    # What makes the node of each kind of value.
    _makers: ClassVar[dict[Kind, Callable[[NodeEncoder, Any], list[Any]]]] = {
        Kind.SCALAR: _scalar,
        Kind.CONTAINER: _container,
        Kind.TENSOR: _tensor,
        Kind.ARRAY: _array,
        Kind.BUFFER: _buffer,
        Kind.GENERATOR: _generator,
        Kind.STATEFUL: _stateful,
        Kind.REDUCED: _reduced,
        Kind.CALL: _call,
        Kind.CONSTANT: _constant,
        Kind.SHARED: _shared,
        **dict.fromkeys((Kind.OBJECT, Kind.MODULE, Kind.FUNCTION, Kind.CLASS), _object),
        **dict.fromkeys((Kind.NAMED, Kind.LEAF), _live),
    }


def _not_saved(value: Any) -> UncapturedError:
    return UncapturedError(f"{describe(value)} in it cannot be saved")


def _is_text(value: Any) -> bool:
    """Whether JSON has it as it is."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    if kind is int:
        return bool(-_MAX_INT < value < _MAX_INT)
    if kind is str:
        return not has_surrogates(value)
    return kind is bool or value is None


def _as_it_is(value: Any) -> list[Any]:
    """A node for what the next launch has: at the same position, or under the same name."""
    return ["named", sort_of(value)] if kind_of(value) in NAMED else ["live"]
