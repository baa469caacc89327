"""Which tensors of a state are stored, under which names, and which share memory.

Aliases are found by comparing the memory that tensors span. A tensor alone in its memory is stored
under its name. The same view twice (tied weights) is stored once, under the first name. Of views
that overlap, the one that covers the others is stored, or else all of the memory that they span,
and each view is noted as type, shape, strides and offset. Views that do not overlap are separate
tensors: a change of one is not visible in another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, Literal

import torch

from resumekit.errors import UnsupportedValueError
from resumekit.serialization.leaves import (
    ELEMENT_TYPES,
    ElementType,
    Leaf,
    dense_strides,
    element_type,
    retyped,
)

_MAX_KEY_CHARACTERS = 100


@dataclass(eq=False, slots=True)  # not frozen: a state has a path for each value
class StatePath:
    """A position in nested state; ``str`` gives it as an expression: ``extras['a'][3].b``.

    Args:
        part: the name of the root, a key, an index or an attribute.
        kind: which of these it is.
        parent: the container's path; None for the root.
    """

    part: Any
    kind: Literal["key", "index", "attribute"] = "key"
    parent: StatePath | None = None
    _name: str | None = field(default=None, init=False)  # once asked for, as each child asks

    def key(self, part: Any) -> StatePath:
        """The path of the value under this key; an enum is stored as its value."""
        return StatePath(part.value if isinstance(part, Enum) else part, "key", self)

    def index(self, part: int) -> StatePath:
        """The path of this element."""
        return StatePath(part, "index", self)

    def attribute(self, part: str) -> StatePath:
        """The path of this field of a namedtuple."""
        return StatePath(part, "attribute", self)

    def __str__(self) -> str:
        if self.parent is None:
            return str(self.part)
        here = f".{self.part}" if self.kind == "attribute" else f"[{_short(self.part)}]"
        return f"{self.parent}{here}"

    @property
    def name(self) -> str:
        """The dotted name below the root, ``transformer.wte.weight`` or ``state[0].exp_avg``.

        A flat dict of tensors by FQN gives the FQNs. Empty for the root.
        """
        if self._name is None:
            self._name = self._below(self.parent.name) if self.parent else ""
        return self._name

    def _below(self, above: str) -> str:
        if self.kind == "attribute" or type(self.part) is str:
            return f"{above}.{self.part}" if above else str(self.part)
        return f"{above}[{_short(self.part)}]"

    @property
    def root(self) -> StatePath:
        """The path of the whole value."""
        return self if self.parent is None else self.parent.root


def _short(part: Any) -> str:
    text = repr(part)
    return text if len(text) <= _MAX_KEY_CHARACTERS else text[:_MAX_KEY_CHARACTERS] + "..."


class UniqueNames:
    """Distinct names; a second ``a.b`` becomes ``a.b~2``."""

    def __init__(self, *reserved: str) -> None:
        self._taken = set(reserved)

    def take(self, wanted: str) -> str:
        """The wanted name, or the first free one after it."""
        # The header of a file is UTF-8, which has no lone surrogates.
        if not wanted.isascii():
            wanted = wanted.encode("utf-8", "replace").decode("utf-8")
        name, number = wanted, 1
        while name in self._taken:
            number += 1
            name = f"{wanted}~{number}"
        self._taken.add(name)
        return name


# ---------------------------------------------------------------- tensors made of others

# Shards, and rows of different lengths, have rules of their own.
_OTHER_CLASSES = ("torch.distributed.", "torch.nested.")


@dataclass(frozen=True, eq=False)
class StoredSubclass:
    """A tensor made of others as a file describes it: its class is known only by name.

    Args:
        name: of the class, with its module.
        context: what the class makes it of, beside tensors.
        parts: the inner tensors by name; some may be of this kind again.
        size: the outer shape.
        strides: the outer strides.
    """

    name: str
    context: Any
    parts: Mapping[str, Any]
    size: tuple[int, ...]
    strides: tuple[int, ...]


def is_subclass(value: Any) -> bool:
    """Whether it is a tensor made of others, live or stored, that is stored by its parts."""
    return isinstance(value, StoredSubclass) or (
        isinstance(value, torch.Tensor) and is_class_of_parts(type(value))
    )


@cache
def is_class_of_parts(kind: Any) -> bool:
    """Whether a class says of which tensors its objects are made."""
    # torch 2.13 utils/_python_dispatch.py is_traceable_wrapper_subclass
    has_parts = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    is_other = any(each.__module__.startswith(_OTHER_CLASSES) for each in kind.__mro__)
    return issubclass(kind, torch.Tensor) and has_parts and not is_other


def parts_of(value: Any) -> StoredSubclass:
    """What a tensor made of others consists of, without a copy."""
    if isinstance(value, StoredSubclass):
        return value
    kind = type(value)
    names, context = value.__tensor_flatten__()
    parts = {name: getattr(value, name) for name in names}
    name = f"{kind.__module__}.{kind.__qualname__}"
    return StoredSubclass(name, context, parts, tuple(value.size()), tuple(value.stride()))


# ---------------------------------------------------------------- which tensors are stored


class FoundTensor:
    """A tensor met in a state.

    A state may have a million of them, so there are no tuples in it: the garbage collector visits
    every object of a container type, again and again.

    Args:
        tensor: the live tensor.
        path: its path in the state, for errors.
        name: the name that it is stored under if it gets bytes of its own.

    Attributes:
        node: what stands for it in the tree; ``store`` fills it in.
        memory: the address of its storage; with the device where it is not in host memory.
        begin: the address of its first byte.
        end: the address of the byte after its last.
        element: the type of its elements.
        num_bytes: of its elements.

    Raises:
        UnsupportedValueError: it cannot be stored bit for bit; names the path.
    """

    __slots__ = (
        "begin",
        "element",
        "end",
        "memory",
        "name",
        "node",
        "num_bytes",
        "storage",
        "tensor",
    )

    def __init__(self, tensor: torch.Tensor, path: StatePath, name: str) -> None:
        self.tensor = tensor
        self.name = name
        self.node: dict[str, Any] = {}
        self.element, self.storage, self.begin, self.end = _examine(tensor, path)
        self.num_bytes = tensor.numel() * self.element.num_bytes
        self.memory: object = self.storage if tensor.is_cpu else (str(tensor.device), self.storage)

    @property
    def view(self) -> tuple[Any, ...]:
        """Equal for tensors that are the same view of the same memory."""
        tensor = self.tensor
        return (self.memory, self.begin, self.end, tensor.dtype, tensor.shape, tensor.stride())

    @property
    def is_row_major(self) -> bool:
        """Whether its strides are those of a new tensor of its shape."""
        strides = self.tensor.stride()
        return strides == (1,) or strides == dense_strides(self.tensor.shape)

    @property
    def overlaps_itself(self) -> bool:
        """Whether some of its elements share their memory, as those of an expanded tensor do."""
        return self.num_bytes > self.end - self.begin

    @property
    def is_unaliased(self) -> bool:
        """Whether it has no bytes that another tensor could share.

        Also true for a lazily conjugated or negated one: its memory does not hold its values.
        """
        return self.num_bytes == 0 or self.tensor.is_conj() or self.tensor.is_neg()

    def leaf(self) -> Leaf:
        """Its values as a leaf of its own."""
        shape = tuple(self.tensor.shape)
        strides: tuple[int, ...] | None = None
        if self.num_bytes and not self.is_row_major:
            # Holes are not stored; what is kept is the order of the dimensions in memory.
            strides = torch.empty_like(self.tensor, device="meta").stride()
            strides = None if strides == dense_strides(shape) else strides
        return Leaf(self.tensor, self.element, shape, strides)

    def view_of(self, name: str, begin: int) -> dict[str, Any]:
        """Its node in a tree, as a view.

        Args:
            name: the tensor that it is a view of.
            begin: the address of that tensor.
        """
        return {
            "of": name,
            "dtype": self.element.name,
            "shape": list(self.tensor.shape),
            "strides": list(self.tensor.stride()),
            "offset": self.begin - begin,
        }


def check_tensor(tensor: torch.Tensor, path: StatePath) -> None:
    """Raises UnsupportedValueError for a tensor that cannot be stored bit for bit."""
    _examine(tensor, path)


def _examine(tensor: torch.Tensor, path: StatePath) -> tuple[ElementType, int, int, int]:
    """The type of its elements, the address of its storage, and its own first and last address.

    Raises:
        UnsupportedValueError: it cannot be stored bit for bit; names the path.
    """
    reason = _refusal(tensor)
    element = element_type(tensor.dtype)
    if reason is None and element is not None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        begin, end = _span(tensor, address, element.num_bytes)
        if end <= address + storage.nbytes():
            return element, address, begin, end
        reason = "a tensor whose memory has been freed", "Gather or restore it first"
    found, remedy = reason or (
        f"a tensor of the unknown type {tensor.dtype}",
        "Store it as a known type",
    )
    raise UnsupportedValueError(str(path), found=found, remedy=remedy)


def _refusal(tensor: torch.Tensor) -> tuple[str, str] | None:
    kind = type(tensor)
    is_plain = kind is torch.Tensor or kind is torch.nn.Parameter
    if not is_plain and kind.__name__ in ("DTensor", "ShardedTensor"):
        return f"a sharded tensor ({kind.__name__})", "Sharded tensors need the sharded path"
    if tensor.is_quantized:
        return f"a quantised tensor ({tensor.dtype})", "Store its int_repr() and its scales"
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        return f"a tensor of layout {layout}", "Store its parts, or to_dense()"
    if not is_plain:
        return f"a tensor of class {kind.__module__}.{kind.__qualname__}", "Store a plain tensor"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no values", "Materialise it first"
    return None


def _span(tensor: torch.Tensor, storage: int, size: int) -> tuple[int, int]:
    # Not data_ptr() of the tensor: that is 0 for an empty one, and refuses a lazily conjugated one.
    begin = storage + int(tensor.storage_offset()) * size
    num_elements = tensor.numel()
    if num_elements > 1 and not tensor.is_contiguous():
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        num_elements = last + 1
    return begin, begin + num_elements * size


_ALIGNMENT = 16  # of the largest element, counted from the beginning of its storage


@dataclass(frozen=True)
class StoredTensors:
    """What to store.

    Args:
        leaves: what gets bytes, by name.
        ties: the names that have no bytes of their own, with the name that has the same tensor.
    """

    leaves: dict[str, Leaf] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)


def store(found: Sequence[FoundTensor], names: UniqueNames) -> StoredTensors:
    """What to store for these tensors; fills in their nodes.

    Args:
        found: every tensor of the payload, in the order met.
        names: for memory that no single tensor covers.
    """
    stored = StoredTensors()
    clusters = _clusters(found)
    for item in found:
        cluster = clusters.get(id(item), (item,))
        if cluster[0] is not item:
            continue
        base = _base(cluster)
        if base is None:
            _store_span(cluster, stored, names)
        else:
            _store_base(base, cluster, stored)
    return stored


def _clusters(found: Sequence[FoundTensor]) -> dict[int, list[FoundTensor]]:
    """The tensors that overlap in memory with each of those that do, by id."""
    first: dict[object, FoundTensor] = {}
    sharing: dict[object, list[FoundTensor]] = {}  # a storage, which most have for themselves
    for item in found:
        if not item.is_unaliased and (other := first.setdefault(item.memory, item)) is not item:
            sharing.setdefault(item.memory, [other]).append(item)
    clusters: dict[int, list[FoundTensor]] = {}
    for items in sharing.values():
        for cluster in overlapping(items):
            clusters.update((id(item), cluster) for item in cluster)
    return clusters


def overlapping(items: Sequence[Any]) -> list[list[Any]]:
    """Parts of one memory, those that overlap together and in the given order.

    Args:
        items: each has the address where it begins, ``begin``, and the one behind it, ``end``.
    """
    order = {id(item): number for number, item in enumerate(items)}
    clusters: list[list[Any]] = []
    reached = 0
    for item in sorted(items, key=attrgetter("begin", "end")):
        if clusters and item.begin < reached:
            clusters[-1].append(item)
        else:
            clusters.append([item])
        reached = max(reached, item.end)
    return [sorted(each, key=lambda item: order[id(item)]) for each in clusters]


def _base(items: Sequence[FoundTensor]) -> FoundTensor | None:
    """The member that contains all others, as equal or as views; None if there is none."""
    first = items[0]
    if first.is_unaliased:
        return first
    is_one = len(items) == 1 or all(item.view == first.view for item in items)
    if is_one and not first.overlaps_itself:
        return first
    begin = min(item.begin for item in items)
    end = max(item.end for item in items)
    if any((item.begin - begin) % item.element.num_bytes for item in items):
        return None  # a view begins at a whole element of its type, counted from the base
    whole = (item for item in items if (item.begin, item.end) == (begin, end) and item.is_row_major)
    return next(whole, None)


def _store_base(base: FoundTensor, items: Sequence[FoundTensor], stored: StoredTensors) -> None:
    stored.leaves[base.name] = base.leaf()
    for item in items:
        if item is not base and item.view != base.view:
            item.node["$tensor"] = item.view_of(base.name, base.begin)
            continue
        item.node["$tensor"] = base.name
        if item is not base:
            stored.ties[item.name] = base.name


def _store_span(items: Sequence[FoundTensor], stored: StoredTensors, names: UniqueNames) -> None:
    """Stores the memory that they span, and every member as a view of it."""
    # Two storages may begin at one address (torch.from_numpy twice): the longer one has all of it.
    longest = max(items, key=lambda item: item.tensor.untyped_storage().nbytes())
    storage = longest.storage
    offset = (min(item.begin for item in items) - storage) // _ALIGNMENT * _ALIGNMENT
    num_bytes = max(item.end for item in items) - storage - offset
    span = retyped(longest.tensor, torch.uint8, offset, (num_bytes,), (1,))
    name = names.take(f"{items[0].name}.storage")
    stored.leaves[name] = Leaf(span, ELEMENT_TYPES["uint8"], (num_bytes,))
    for item in items:
        item.node["$tensor"] = item.view_of(name, storage + offset)
