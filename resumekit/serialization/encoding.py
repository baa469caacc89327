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
``$subclass``     a tensor made of others: its class, context, inner tensors, shape, strides
================  =====================================================================

A decoded value is equal and of the same type, with these exceptions: an enum becomes its value, an
``nn.Parameter`` a plain tensor, a namedtuple a new type of the same name and fields (equal to the
old one); tensors are on the CPU, without holes in memory. Tensors that share memory share it again;
of lists and dicts only the values are kept. Other values are refused, with their path.

What a load refuses, a save has refused already: both go by the limits here.
"""

from __future__ import annotations

import math
import re
import struct
import warnings
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from json import dumps
from keyword import iskeyword
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from resumekit.errors import UnsupportedValueError
from resumekit.serialization.leaves import Leaf, bytes_leaf
from resumekit.serialization.tensors import (
    FoundTensor,
    StatePath,
    StoredTensors,
    UniqueNames,
    is_subclass,
    parts_of,
    store,
)

# Levels of JSON. The parser allows 64; two are the index's own, the last value takes some more.
MAX_DEPTH = 40

# A namedtuple type costs a tenth of a millisecond to make.
MAX_NAMEDTUPLE_TYPES = 1000
_MAX_NAMEDTUPLE_FIELDS = 1000

_MAX_DIMENSIONS = 64
MAX_SIZE = 1 << 48
_MAX_ELEMENTS = 1 << 60

# Keys with one and the same hash make a dict quadratic; ordinary keys have two (-1 and -2) at most.
_MAX_EQUAL_HASHES = 100

# The default_factory that a defaultdict may have, by name.
FACTORIES: dict[str | None, Callable[[], Any] | None] = {
    None: None,
    **{kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)},
}


def hash_flood(keys: Collection[Hashable]) -> bool:
    """Whether so many keys share one hash that a dict of them would take for ever."""
    if len(keys) <= _MAX_EQUAL_HASHES:
        return False
    return max(Counter(map(hash, keys)).values()) > _MAX_EQUAL_HASHES


def namedtuple_type(name: Any, fields: Any) -> type[Any] | None:
    """A namedtuple type of this name and these fields; None where Python allows none."""
    names = [name, *fields] if isinstance(fields, list) else [name, fields]
    if not all(isinstance(item, str) and item.isidentifier() for item in names):
        return None
    if any(iskeyword(item) for item in names) or len(names) > _MAX_NAMEDTUPLE_FIELDS:
        return None
    if any(field.startswith("_") for field in fields) or len(set(fields)) != len(fields):
        return None
    made: type[Any] = namedtuple(name, fields)  # type: ignore[misc]
    return made


def typed(kind: type[Any], value: Any) -> Any:
    """A value from JSON that may hold anything.

    Raises:
        ValueError: it is not of this type.
    """
    if type(value) is not kind:
        raise ValueError(f"{str(value)[:80]!r} is not of type {kind.__name__}")
    return value


def checked_sizes(sizes: Any) -> tuple[int, ...]:
    """A shape, or strides, from JSON that may hold anything.

    Raises:
        ValueError: it is not a list of sizes.
    """
    if not isinstance(sizes, list) or len(sizes) > _MAX_DIMENSIONS:
        raise ValueError(f"{str(sizes)[:80]!r} is not a list of sizes")
    for size in sizes:
        if type(size) is not int or not 0 <= size <= MAX_SIZE:
            raise ValueError(f"{str(size)[:80]!r} is not a size")
    return tuple(sizes)


def checked_shape(shape: Any) -> tuple[int, ...]:
    """A shape from JSON that may hold anything.

    Raises:
        ValueError: it is not a shape, or one that torch and numpy cannot count the elements of.
    """
    checked = checked_sizes(shape)
    if math.prod(max(size, 1) for size in checked) > _MAX_ELEMENTS:
        raise ValueError(f"the shape {str(shape)[:80]} is too large")
    return checked


# Fixed-size kinds only; what follows the digits is the unit of a datetime64 or timedelta64.
_SIMPLE = re.compile(r"[<>|][biufcmMSUV][0-9]{1,9}(\[[0-9]{0,9}[A-Za-zμ]{1,2}\])?")
_MAX_FIELDS = 10_000
_MAX_NESTING = 8


def dtype_to_json(dtype: np.dtype[Any]) -> Any:
    """The dtype as a string or, for a structured one, as a list of fields.

    Raises:
        ValueError: it holds Python objects, or cannot be described exactly.
    """
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of the types that are refused below
        described = _as_lists(np.lib.format.dtype_to_descr(dtype))
    try:
        same = dtype_from_json(described) == dtype
    except ValueError:
        same = False
    if not same:
        raise ValueError("numpy cannot describe it in plain text")
    return described


def dtype_from_json(described: Any) -> np.dtype[Any]:
    """The inverse of ``dtype_to_json``; takes nothing else.

    Raises:
        ValueError: it does not describe a dtype.
    """
    try:
        return np.lib.format.descr_to_dtype(_checked(described))
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _as_lists(described: Any) -> Any:
    if isinstance(described, list | tuple):
        return [_as_lists(item) for item in described]
    return described


def _checked(described: Any, nesting: int = 0) -> Any:
    """The form that numpy expects, from JSON that may hold anything."""
    if isinstance(described, str) and _SIMPLE.fullmatch(described):
        return described
    if not isinstance(described, list) or nesting > _MAX_NESTING or len(described) > _MAX_FIELDS:
        raise ValueError(f"{str(described)[:80]!r} is not a dtype")
    return [_field(field, nesting) for field in described]


def _field(field: Any, nesting: int) -> tuple[Any, ...]:
    if not isinstance(field, list) or len(field) not in (2, 3):
        raise ValueError(f"{str(field)[:80]!r} is not a field")
    name = field[0]
    if isinstance(name, list) and len(name) == 2 and all(isinstance(part, str) for part in name):
        name = tuple(name)  # a title and a name
    elif not isinstance(name, str):
        raise ValueError(f"{str(name)[:80]!r} is not the name of a field")
    inner = _checked(field[1], nesting + 1)
    if len(field) == 2:
        return name, inner
    return name, inner, checked_shape(field[2])


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


def plain_tree(value: Any, *, where: str) -> Any:
    """The tree of a value that is decoded to an equal one, and refers to no tensor.

    Raises:
        UnsupportedValueError: there is none; names the path.
    """
    encoder = Encoder()
    tree = encoder.encode(value, where=where)
    if encoder.has_enums or encoder.finish().leaves:
        raise UnsupportedValueError(
            where, found=f"{value!r:.100}", expected="plain values", remedy="Store a plain tensor"
        )
    return tree


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

    @property
    def has_enums(self) -> bool:
        """Whether there was an enum, which is decoded as its value."""
        return self._num_enums > 0

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
        if is_subclass(value):
            return self._subclass(value, path, depth)
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

    def _subclass(self, value: Any, path: StatePath, depth: int) -> Any:
        made_of = parts_of(value)
        context = plain_tree(made_of.context, where=f"{path} (context of a {made_of.name})")
        for name, part in made_of.parts.items():
            if not isinstance(part, torch.Tensor):
                raise UnsupportedValueError(
                    str(path), found=f"a {made_of.name} whose {name} is no tensor"
                )
        parts = {
            name: self._encode(part, path.attribute(name), depth + 3)
            for name, part in made_of.parts.items()
        }
        sizes = [*made_of.size], [*made_of.strides]
        return {"$subclass": [made_of.name, context, parts, *sizes]}

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
    if has_surrogates(value):  # JSON would join two of them to one character
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
    return all(type(k) is str and k[:1] != "$" and not has_surrogates(k) for k in keys)


def has_surrogates(text: str) -> bool:
    """Whether UTF-8 has no bytes for some of its characters."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def _without_enums(key: Any) -> Any:
    """The key as it is decoded."""
    if isinstance(key, Enum):
        return _without_enums(key.value)
    return tuple(map(_without_enums, key)) if isinstance(key, tuple) else key
