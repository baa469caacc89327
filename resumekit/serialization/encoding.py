"""Nested Python state as JSON and bytes, without pickle.

None, bools, 64-bit ints, finite floats, strings, lists and dicts with string keys are plain JSON.
Everything else is an object with one key that begins with ``$``:

================  =====================================================================
``$int``          an int beyond 64 bits, hexadecimal
``$float``        nan or an infinity, the 16 hexadecimal digits of its bits
``$complex``      its real and imaginary part
``$str``          a string that holds surrogates, hexadecimal UTF-8
``$bytes``        bytes, hexadecimal; long ones are in the data file: ``$blob``, by name
``$bytearray``    a bytearray: the name of its bytes
``$numbers``      a long list of nothing but 64-bit ints or of floats: dtype, the name of its bytes
``$tuple``        the elements; ``$set`` likewise, in a fixed order
``$dict``         alternating keys and values; ``$ordered_dict`` and ``$counter`` likewise
``$default_dict`` the name of the builtin factory or null, then keys and values
``$deque``        the maximal length or null, then the elements
``$namedtuple``   the type's name, the names of the fields, the elements
``$scalar``       a numpy scalar: dtype, hexadecimal bytes; ``$numpy_str``, ``$numpy_bytes``
``$array``        a numpy array: dtype, shape, ``"C"`` or ``"F"``, the name of its bytes
``$torch``        a dtype, a layout or a memory format of torch, by name
``$device``       a ``torch.device``, as text; ``$size``: the numbers of a ``torch.Size``
``$tensor``       the name of a tensor, or a view of one: of, dtype, shape, strides, offset in bytes
================  =====================================================================

A decoded value is equal and of the same type, with these exceptions: an enum becomes its value, an
``nn.Parameter`` a plain tensor, a namedtuple a new type of the same name and fields (equal to the
old one); tensors are on the CPU, without holes in memory. Tensors that share memory share it again;
of lists and dicts only the values are kept. Other values are refused, with their path.

The state of one rank is its tensors by name, sharded or plain, and all else as such a tree.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from json import dumps
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from resumekit.errors import UnsupportedValueError
from resumekit.serialization.layouts import part_name
from resumekit.serialization.leaves import (
    FACTORIES,
    MAX_DEPTH,
    MAX_NAMEDTUPLE_TYPES,
    Leaf,
    bytes_leaf,
    dtype_to_json,
    hash_flood,
    namedtuple_type,
)
from resumekit.serialization.sharding import FlatPart, is_sharded, local_part, pieces_of
from resumekit.serialization.tensors import (
    FoundTensor,
    StatePath,
    StoredTensors,
    UniqueNames,
    store,
)


@dataclass(frozen=True)
class Encoded:
    """State in storable form.

    Args:
        tree: what JSON takes; refers to the tensors by name.
        tensors: what goes into the data file, by name; still the live memory, nothing is copied.
        ties: names of tensors that have no bytes of their own, with the name of the same tensor.
    """

    tree: Any
    tensors: dict[str, Leaf]
    ties: dict[str, str]


def encode(value: Any, *, where: str) -> Encoded:
    """The value in storable form; no copy of a tensor is made.

    Args:
        value: nested state.
        where: what error messages call it, e.g. ``"extras"``.

    Raises:
        UnsupportedValueError: a part of it cannot be stored; names the path.
    """
    encoder = Encoder()
    tree = encoder.encode(value, where=where)
    stored = encoder.finish()
    return Encoded(tree, stored.leaves, stored.ties)


_MAX_INLINE_BYTES = 1024
_MAX_INLINE_NUMBERS = 1024

_FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}


class Encoder:
    """Encodes any number of values whose tensors go into one file.

    Args:
        prefix_names: whether tensor names begin with the name of their value's root.
    """

    def __init__(self, *, prefix_names: bool = False) -> None:
        self._prefix_names = prefix_names
        self._names = UniqueNames("__metadata__")  # the one name that safetensors keeps for itself
        self._leaves: dict[str, Leaf] = {}
        self._found: list[FoundTensor] = []
        self._arrays: dict[int, tuple[npt.NDArray[Any], dict[str, Any]]] = {}
        self._namedtuples: dict[tuple[str, ...], bool] = {}
        self._num_enums = 0
        self._is_in_key = False
        self._by_type: dict[type, Callable[[Any, StatePath, int], Any]] = {
            type(None): _as_it_is,
            bool: _as_it_is,
            int: _int,
            float: _float,
            complex: _complex,
            str: _str,
            bytes: self._bytes,
            bytearray: self._bytearray,
            list: self._list,
            tuple: lambda value, path, depth: {"$tuple": self._items(value, path, depth + 1)},
            set: self._set,
            deque: self._deque,
            dict: self._dict,
            OrderedDict: lambda *given: {"$ordered_dict": self._pairs(*given)},
            Counter: lambda *given: {"$counter": self._pairs(*given)},
            defaultdict: self._default_dict,
            np.ndarray: self._array,
            torch.dtype: _constant,
            torch.layout: _constant,
            torch.memory_format: _constant,
            torch.device: lambda value, *_: {"$device": str(value)},
            torch.Size: lambda value, *_: {"$size": list(value)},
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
        }

    def encode(self, value: Any, *, where: str) -> Any:
        """The tree of one value; complete once ``finish`` was called.

        Raises:
            UnsupportedValueError: a part of it cannot be stored; names the path.
        """
        return self._encode(value, StatePath(where), 0)

    def finish(self) -> StoredTensors:
        """The content of the data file; completes the references in the trees. The last call."""
        stored = store(self._found, self._names)
        stored.leaves.update(self._leaves)
        self._release()
        return stored

    def _release(self) -> None:
        # Its methods refer to this encoder, and that to live tensors: without the cycle they go at
        # once, not with a collection in the training.
        self._by_type.clear()

    def _encode(self, value: Any, path: StatePath, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise UnsupportedValueError(
                str(path), found="nested too deeply, or part of itself", remedy="Flatten it"
            )
        known = self._by_type.get(type(value))
        if known is not None:
            return known(value, path, depth)
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path, depth)
        if isinstance(value, Enum):
            self._num_enums += 1
            return self._encode(value.value, path, depth)
        if isinstance(value, np.generic):
            return _scalar(value, path)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return self._namedtuple(value, path, depth)
        kind = type(value)
        raise UnsupportedValueError(
            str(path),
            found=f"an object of class {kind.__module__}.{kind.__qualname__}",
            expected="plain values, numpy arrays or tensors",
            remedy="Store its state_dict() or its plain values instead",
        )

    def _bytes(self, value: bytes, path: StatePath, _: int) -> Any:
        if len(value) <= _MAX_INLINE_BYTES:
            return {"$bytes": value.hex()}
        return {"$blob": self._leaf(bytes_leaf(value), path)}

    def _bytearray(self, value: bytearray, path: StatePath, _: int) -> Any:
        # A copy: the training may change it, and cannot resize it while a view of it exists.
        return {"$bytearray": self._leaf(bytes_leaf(bytes(value)), path)}

    def _leaf(self, leaf: Leaf, path: StatePath) -> str:
        name = self._name(path)
        self._leaves[name] = leaf
        return name

    def _name(self, path: StatePath) -> str:
        name = path.name
        if name and not self._prefix_names:
            return self._names.take(name)
        root = str(path.root.part)
        if not name:
            return self._names.take(root)
        separator = "" if name.startswith("[") else "."
        return self._names.take(f"{root}{separator}{name}")

    # Containers. Their own tag costs a level of JSON, so their elements are two levels down.

    def _list(self, value: list[Any], path: StatePath, depth: int) -> Any:
        numbers = as_numbers(value)
        if numbers is not None:
            return {"$numbers": [numbers.dtype.str, self._leaf(bytes_leaf(numbers), path)]}
        return self._items(value, path, depth)

    def _items(self, value: Iterable[Any], path: StatePath, depth: int) -> list[Any]:
        return [
            self._encode(item, path.index(index), depth + 1) for index, item in enumerate(value)
        ]

    def _deque(self, value: deque[Any], path: StatePath, depth: int) -> Any:
        return {"$deque": [value.maxlen, *self._items(value, path, depth + 1)]}

    def _set(self, value: set[Any], path: StatePath, depth: int) -> Any:
        # Sorted: the order in memory is another one in the next process.
        return {"$set": sorted(self._keys(value, path, depth), key=dumps)}

    def _namedtuple(self, value: Any, path: StatePath, depth: int) -> Any:
        kind, fields = type(value).__name__, list(value._fields)
        signature = (kind, *fields)
        if signature not in self._namedtuples:
            self._namedtuples[signature] = namedtuple_type(kind, fields) is not None
        if not self._namedtuples[signature] or len(self._namedtuples) > MAX_NAMEDTUPLE_TYPES:
            raise UnsupportedValueError(
                str(path), found=f"a namedtuple {kind} that cannot be made again from its fields"
            )
        items = [
            self._encode(item, path.attribute(field), depth + 2)
            for field, item in zip(fields, value, strict=True)
        ]
        return {"$namedtuple": [kind, fields, *items]}

    def _dict(self, value: dict[Any, Any], path: StatePath, depth: int) -> Any:
        if _are_plain_keys(value):
            below, encode = depth + 1, self._encode
            return {
                key: encode(item, StatePath(key, "key", path), below) for key, item in value.items()
            }
        return {"$dict": self._pairs(value, path, depth)}

    def _default_dict(self, value: defaultdict[Any, Any], path: StatePath, depth: int) -> Any:
        factory = value.default_factory
        if factory not in _FACTORY_NAMES:
            raise UnsupportedValueError(
                str(path),
                found=f"a defaultdict whose default_factory is {factory!r}",
                expected="a builtin: " + ", ".join(map(str, FACTORIES)),
                remedy="Store dict(value)",
            )
        return {"$default_dict": [_FACTORY_NAMES[factory], *self._pairs(value, path, depth)]}

    def _pairs(self, value: Mapping[Any, Any], path: StatePath, depth: int) -> list[Any]:
        flat: list[Any] = []
        for key, (original, item) in zip(
            self._keys(value, path, depth), value.items(), strict=True
        ):
            flat += (key, self._encode(item, path.key(original), depth + 2))
        return flat

    def _keys(self, keys: Iterable[Any], path: StatePath, depth: int) -> list[Any]:
        originals = list(keys)
        num_enums, is_in_key = self._num_enums, self._is_in_key
        self._is_in_key = True
        trees = [self._encode(key, path.key(key), depth + 2) for key in originals]
        self._is_in_key = is_in_key
        if self._num_enums > num_enums and len(set(map(_without_enums, originals))) < len(trees):
            raise UnsupportedValueError(
                str(path), found="an enum as a key beside a key that equals the enum's value"
            )
        if hash_flood(originals):
            raise UnsupportedValueError(str(path), found="more than 100 keys with the same hash")
        return trees

    # Arrays and tensors.

    def _array(self, value: npt.NDArray[Any], path: StatePath, _: int) -> Any:
        if id(value) not in self._arrays:
            dtype = described_dtype(value.dtype, path)
            fortran = value.flags.f_contiguous and not value.flags.c_contiguous
            leaf = bytes_leaf(value.T if fortran else value)
            order = "F" if fortran else "C"
            node = {"$array": [dtype, list(value.shape), order, self._leaf(leaf, path)]}
            self._arrays[id(value)] = (value, node)  # the array too: its id must stay its own
        return self._arrays[id(value)][1]

    def _tensor(self, value: torch.Tensor, path: StatePath, _: int) -> Any:
        found = self._examined(value, path)
        self._found.append(found)
        return found.node

    def _examined(self, value: torch.Tensor, path: StatePath) -> FoundTensor:
        found = FoundTensor(value, path, self._name(path))
        if self._is_in_key:
            raise UnsupportedValueError(
                str(path),
                found="a tensor as a key, which is looked up by its address in memory",
                remedy="Use a name as the key",
            )
        return found


def _as_it_is(value: Any, _: StatePath, __: int) -> Any:
    return value


def as_numbers(value: list[Any]) -> npt.NDArray[Any] | None:
    """A long list as an array, if it holds nothing but 64-bit ints or nothing but floats.

    The order of a sampler is a list of a million ints.
    """
    if len(value) <= _MAX_INLINE_NUMBERS:
        return None
    kinds = set(map(type, value))
    if kinds == {float}:
        return np.array(value, "<f8")
    if kinds == {int} and min(value) >= -(2**63) and max(value) < 2**63:
        return np.array(value, "<i8")
    return None


def _int(value: int, _: StatePath, __: int) -> Any:
    return value if -(2**63) <= value < 2**63 else {"$int": hex(value)}


def _float(value: float, _: StatePath, __: int) -> Any:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _complex(value: complex, path: StatePath, depth: int) -> Any:
    return {"$complex": [_float(value.real, path, depth), _float(value.imag, path, depth)]}


def _str(value: str, _: StatePath, __: int) -> Any:
    if _has_surrogates(value):  # JSON would join two of them to one character
        return {"$str": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _constant(value: Any, _: StatePath, __: int) -> Any:
    return {"$torch": str(value).removeprefix("torch.")}


def _scalar(value: np.generic, path: StatePath) -> Any:
    if isinstance(value, np.str_):  # an array, and numpy's str(), would drop its trailing NULs
        return {"$numpy_str": _str("".join(value), path, 0)}
    if isinstance(value, np.bytes_):
        return {"$numpy_bytes": bytes(value).hex()}
    return {"$scalar": [described_dtype(value.dtype, path), value.tobytes().hex()]}


def described_dtype(dtype: np.dtype[Any], path: StatePath) -> Any:
    """The dtype as JSON.

    Raises:
        UnsupportedValueError: its values cannot be stored without pickle.
    """
    try:
        return dtype_to_json(dtype)
    except ValueError as error:
        raise UnsupportedValueError(
            str(path), found=f"numpy data of dtype {dtype!s:.80}: {error}"
        ) from error


def _are_plain_keys(keys: Iterable[Any]) -> bool:
    for key in keys:
        if type(key) is not str or key[:1] == "$" or not (key.isascii() or _is_text(key)):
            return False
    return True


def _is_text(key: str) -> bool:
    return not _has_surrogates(key)


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _without_enums(key: Any) -> Any:
    """The key as it is decoded."""
    if isinstance(key, Enum):
        return _without_enums(key.value)
    return tuple(map(_without_enums, key)) if isinstance(key, tuple) else key


# ---------------------------------------------------------------- the state of one rank


@dataclass(frozen=True)
class LocalState:
    """A state as one rank holds it.

    Args:
        key: the component's key.
        tree: everything except tensors, which it refers to by name.
        tensors: the live tensors by name, sharded or plain.
        found: the part of each in this rank's memory.
        leaves: bytes that are no tensors, equal on every rank.
        ties: names of tensors that are the same tensor as another name.
        first_rank_only: the plain tensors that may differ between the ranks; rank 0's are stored.
    """

    key: str
    tree: Any
    tensors: dict[str, Any]
    found: dict[str, FoundTensor]
    leaves: dict[str, Leaf]
    ties: dict[str, str]
    first_rank_only: frozenset[str] = frozenset()

    @property
    def layout(self) -> Any:
        """All that a plan depends on; equal layouts have the same plan."""
        tensors = {
            name: (tensor.dtype, tensor.shape, local_part(tensor).shape, sharding_of(tensor))
            for name, tensor in self.tensors.items()
        }
        return tensors, self.ties, self.first_rank_only

    def leaves_of(self, name: str) -> Iterator[tuple[str, Leaf]]:
        """This rank's parts of a tensor, each with the name that it is stored under."""
        path = StatePath(name)
        for number, piece in enumerate(pieces_of(self.tensors[name])):
            yield part_name(name, number), FoundTensor(piece, path, name).leaf()


def encode_local(key: str, state: Any, *, first_rank_only: Collection[str] = ()) -> LocalState:
    """The state of one component as this rank holds it; nothing is copied.

    Args:
        key: the component's key.
        state: nested state; tensors are named by their path in it, a model's by FQN.
        first_rank_only: names of plain tensors that may differ between the ranks.

    Raises:
        UnsupportedValueError: a value cannot be stored; names its path.
    """
    return _LocalEncoder().local_state(key, state, frozenset(first_rank_only))


def sharding_of(tensor: Any) -> Any:
    """The mesh and the placements of a DTensor; None for a plain tensor. Equal for equal ones."""
    if isinstance(tensor, FlatPart):
        return tensor.begin
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else None


class _LocalEncoder(Encoder):
    """Notes tensors by name instead of arranging them, and takes DTensors by their local part."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Any] = {}
        self.found: dict[str, FoundTensor] = {}
        self.ties: dict[str, str] = {}
        self._owners: dict[Any, str] = {}
        self._by_type[FlatPart] = self._flat

    def local_state(self, key: str, state: Any, first_rank_only: frozenset[str]) -> LocalState:
        tree = self.encode(state, where=key)
        self._release()
        return LocalState(
            key, tree, self.tensors, self.found, self._leaves, self.ties, first_rank_only
        )

    def _flat(self, value: FlatPart, path: StatePath, _: int) -> Any:
        found = self._examined(value.local, path)
        # A tie is the same object twice, which ranks with an empty part see too.
        return self._note(value, found, id(value))

    def _tensor(self, value: Tensor, path: StatePath, _: int) -> Any:
        found = self._examined(local_part(value), path)
        view = (found.view, tuple(value.shape), sharding_of(value))
        return self._note(value, found, None if found.is_unaliased else view)

    def _note(self, tensor: Any, found: FoundTensor, identity: object) -> Any:
        """The node of a tensor; equal identities are ties, None is equal to nothing."""
        name = found.name
        first = name if identity is None else self._owners.setdefault(identity, name)
        if first == name:
            self.tensors[name] = tensor
            self.found[name] = found
        else:
            self.ties[name] = first
        return {"$tensor": first}
