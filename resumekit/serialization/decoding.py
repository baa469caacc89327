"""Decodes a tree and tensors to Python state.

The tree may come from anybody: only the builtin types that ``encoding`` lists are created, no class
is looked up by a name in the file, and no more memory is allocated than the file has bytes. A
tensor made of others is its parts and the name of its class, until ``subclasses`` finds the class.
"""

from __future__ import annotations

import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import torch

from resumekit.errors import CorruptCheckpointError, FormatVersionError
from resumekit.serialization.encoding import (
    FACTORIES,
    MAX_DEPTH,
    MAX_NAMEDTUPLE_TYPES,
    checked_shape,
    checked_sizes,
    dtype_from_json,
    hash_flood,
    namedtuple_type,
    typed,
)
from resumekit.serialization.leaves import (
    ELEMENT_TYPES,
    TORCH_CONSTANTS,
    ElementType,
    dense_strides,
    flat_bytes,
    retyped,
)
from resumekit.serialization.tensors import StoredSubclass


class Decoder:
    """Decodes any number of trees that share one data file.

    Args:
        tensors: the tensors of the data file, by name.
        where: what error messages call the file.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
        self._tensors = tensors
        self._where = where
        self._blobs: dict[str, bytes] = {}
        self._spent: set[str] = set()
        self._arrays: dict[tuple[str, str], Any] = {}
        self._namedtuples: dict[tuple[str, ...], type[Any]] = {}

    def decode(self, tree: Any) -> Any:
        """The value of one tree.

        Raises:
            CorruptCheckpointError: the tree is not one that the codec makes.
            FormatVersionError: it needs a newer torch.
        """
        try:
            return self._decode(tree, 0)
        except (ValueError, TypeError, OverflowError) as error:
            raise CorruptCheckpointError(
                self._where, found=f"not a tree of the codec: {error}"
            ) from error

    def _decode(self, tree: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if isinstance(tree, list):
            return self._items(tree, depth)
        if not isinstance(tree, dict):
            return tree
        tag = next(iter(tree), "")
        if len(tree) == 1 and tag in self._BY_TAG:
            return self._BY_TAG[tag](self, tree[tag], depth + 1)
        if any(key.startswith("$") for key in tree):
            raise ValueError(f"an object with the keys {str(list(tree))[:80]}")
        return {key: self._decode(item, depth + 1) for key, item in tree.items()}

    def _items(self, body: Any, depth: int) -> list[Any]:
        return [self._decode(item, depth + 1) for item in typed(list, body)]

    def _pairs(self, body: Any, depth: int) -> list[tuple[Any, Any]]:
        flat = self._items(body, depth)
        if len(flat) % 2:
            raise ValueError("a key without a value")
        self._check_keys(flat[::2])
        return list(zip(flat[::2], flat[1::2], strict=True))

    def _check_keys(self, keys: list[Any]) -> None:
        if any(isinstance(key, torch.Tensor | StoredSubclass) for key in keys):
            raise ValueError("a tensor as a key")
        if hash_flood(keys):
            raise ValueError("more than 100 keys with the same hash")
        if len(set(keys)) != len(keys):
            raise ValueError("a key that is there twice")

    def _set(self, body: Any, depth: int) -> set[Any]:
        items = self._items(body, depth)
        self._check_keys(items)
        return set(items)

    def _default_dict(self, body: Any, depth: int) -> Any:
        factory, *flat = typed(list, body)
        if not (factory is None or isinstance(factory, str)) or factory not in FACTORIES:
            raise ValueError(f"the default_factory {str(factory)[:80]!r}")
        return defaultdict(FACTORIES[factory], self._pairs(flat, depth))

    def _deque(self, body: Any, depth: int) -> Any:
        maxlen, *items = typed(list, body)
        if maxlen is not None and (typed(int, maxlen) < len(items)):
            raise ValueError(f"a deque of {len(items)} elements and maxlen {maxlen}")
        return deque(self._items(items, depth), maxlen)

    def _namedtuple(self, body: Any, depth: int) -> Any:
        name, fields, *items = typed(list, body)
        signature = (typed(str, name), *(typed(str, field) for field in typed(list, fields)))
        kind = self._namedtuples.get(signature)
        if kind is None:
            kind = namedtuple_type(name, fields)
            if kind is None or len(self._namedtuples) >= MAX_NAMEDTUPLE_TYPES:
                raise ValueError(f"the namedtuple {str(signature)[:80]}")
            self._namedtuples[signature] = kind
        return kind(*self._items(items, depth))

    def _complex(self, body: Any, depth: int) -> complex:
        real, imaginary = self._items(body, depth)
        return complex(typed(float, real), typed(float, imaginary))

    def _blob(self, name: Any, _: int) -> bytes:
        if name not in self._blobs:
            self._blobs[name] = bytes(self._bytes_of(name))
        return self._blobs[name]

    def _numbers(self, body: Any, _: int) -> list[Any]:
        described, name = typed(list, body)
        if described not in ("<i8", "<f8"):
            raise ValueError(f"numbers of the dtype {str(described)[:80]!r}")
        numbers: list[Any] = np.frombuffer(self._bytes_to_copy(name), described).tolist()
        return numbers

    def _bytearray(self, name: Any, _: int) -> bytearray:
        return bytearray(self._bytes_to_copy(name))

    def _bytes_to_copy(self, name: Any) -> memoryview:
        # Named a thousand times, a small file would fill the memory.
        found = self._bytes_of(name)
        if name in self._spent:
            raise ValueError(f"the bytes {str(name)[:80]!r} are there twice")
        self._spent.add(name)
        return found

    def _bytes_of(self, name: Any) -> memoryview:
        tensor = self._named(name)
        if tensor.dtype is not torch.uint8 or tensor.dim() != 1:
            raise ValueError(f"{name!r} is not stored as plain bytes")
        return flat_bytes(tensor)

    def _named(self, name: Any) -> torch.Tensor:
        if not isinstance(name, str) or name not in self._tensors:
            raise ValueError(f"the data file has no {str(name)[:80]!r}")
        return self._tensors[name]

    def _array(self, body: Any, _: int) -> Any:
        described, shape, order, name = typed(list, body)
        if order not in ("C", "F"):
            raise ValueError(f"the order {str(order)[:80]!r}")
        buffer, dtype = self._bytes_of(name), dtype_from_json(described)
        key = (name, str(body))  # an array that occurs twice is one object again
        if key not in self._arrays:
            self._arrays[key] = _ndarray(checked_shape(shape), dtype, buffer, order)
        return self._arrays[key]

    def _constant(self, name: Any, _: int) -> Any:
        if typed(str, name) in TORCH_CONSTANTS:
            return TORCH_CONSTANTS[name]
        return known_element(name, where=self._where).dtype  # raises: this torch has none

    def _tensor(self, body: Any, _: int) -> torch.Tensor:
        if not isinstance(body, dict):
            return self._named(body)
        if set(body) != {"of", "dtype", "shape", "strides", "offset"}:
            raise ValueError(f"a view with the keys {str(list(body))[:80]}")
        base = self._named(body["of"])
        if base.stride() != dense_strides(tuple(base.shape)):
            raise ValueError(f"a view of {body['of']!r}, which is not row-major")
        element = known_element(body["dtype"], where=self._where)
        shape, strides = checked_shape(body["shape"]), checked_sizes(body["strides"])
        offset = typed(int, body["offset"])
        if len(shape) != len(strides) or offset < 0 or offset % element.num_bytes:
            raise ValueError(f"a view of {body['of']!r} at byte {offset}")
        last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        extent = 0 if 0 in shape else (last + 1) * element.num_bytes
        if offset + extent > base.numel() * base.element_size():
            raise ValueError(f"a view beyond the end of {body['of']!r}")
        begin = base.storage_offset() * base.element_size() + offset
        return retyped(base, element.dtype, begin // element.num_bytes, shape, strides)

    def _subclass(self, body: Any, depth: int) -> StoredSubclass:
        name, context, trees, size, strides = typed(list, body)
        parts = {each: self._decode(tree, depth + 2) for each, tree in typed(dict, trees).items()}
        if not all(isinstance(part, torch.Tensor | StoredSubclass) for part in parts.values()):
            raise ValueError(f"a part of a {str(name)[:80]!r} that is no tensor")
        context = self._decode(context, depth + 1)
        sizes = checked_shape(size), checked_sizes(strides)
        return StoredSubclass(typed(str, name), context, parts, *sizes)

    # Not in the instance: references to its own methods would keep all tensors until the garbage
    # collector runs, and it is paused during a resume.
    _BY_TAG: ClassVar[dict[str, Callable[[Decoder, Any, int], Any]]] = {
        "$int": lambda _, body, depth: _int(body, depth),
        "$float": lambda _, body, depth: _float(body, depth),
        "$complex": _complex,
        "$str": lambda _, body, depth: _str(body, depth),
        "$bytes": lambda _, body, depth: _bytes(body, depth),
        "$blob": _blob,
        "$bytearray": _bytearray,
        "$numbers": _numbers,
        "$tuple": lambda self, body, depth: tuple(self._items(body, depth)),
        "$set": _set,
        "$dict": lambda self, body, depth: dict(self._pairs(body, depth)),
        "$ordered_dict": lambda self, body, depth: OrderedDict(self._pairs(body, depth)),
        "$counter": lambda self, body, depth: Counter(dict(self._pairs(body, depth))),
        "$default_dict": _default_dict,
        "$deque": _deque,
        "$namedtuple": _namedtuple,
        "$scalar": lambda _, body, depth: _scalar(body, depth),
        "$numpy_str": lambda self, body, depth: np.str_(typed(str, self._decode(body, depth))),
        "$numpy_bytes": lambda _, body, depth: np.bytes_(_bytes(body, depth)),
        "$array": _array,
        "$torch": _constant,
        "$device": lambda _, body, depth: _device(body, depth),
        "$size": lambda _, body, depth: torch.Size(typed(int, each) for each in typed(list, body)),
        "$tensor": _tensor,
        "$subclass": _subclass,
    }


def decode(tree: Any, tensors: Mapping[str, torch.Tensor], *, where: str = "payload") -> Any:
    """The value that was encoded.

    Args:
        tree: from ``encode``.
        tensors: for each name in the tree a CPU tensor with the bytes of its leaf. They become part
            of the value.
        where: what error messages call it.

    Raises:
        CorruptCheckpointError: the tree is not one that ``encode`` makes.
        FormatVersionError: it needs a newer torch.
    """
    return Decoder(tensors, where=where).decode(tree)


def references(tree: Any) -> Iterator[tuple[str, bool]]:
    """The names of the tensors that a tree refers to, some more than once.

    Each comes with whether it is read as bytes or as a view, and so always needed whole.
    """
    if isinstance(tree, list):
        for item in tree:
            yield from references(item)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            if key == "$tensor" and isinstance(item, dict):
                yield str(item.get("of")), True
            elif key in ("$tensor", "$blob", "$bytearray"):
                yield str(item), key != "$tensor"
            elif key in ("$array", "$numbers") and isinstance(item, list):
                yield str(item[-1:] and item[-1]), True
            else:
                yield from references(item)


def known_element(name: Any, *, where: str) -> ElementType:
    """The element type of this name, which the running torch has.

    Raises:
        ValueError: there is none of that name.
        FormatVersionError: this torch is too old for it.
    """
    element = ELEMENT_TYPES.get(name) if isinstance(name, str) else None
    if element is None:
        raise ValueError(f"the element type {str(name)[:80]!r}")
    if element.torch_dtype is None:
        raise FormatVersionError(
            where,
            found=f"the type {name}, which torch {torch.__version__} does not have",
            remedy="Install the torch that wrote the checkpoint, or a newer one",
        )
    return element


def _int(body: Any, _: int) -> int:
    return int(typed(str, body), 16)


def _float(body: Any, _: int) -> float:
    bits = _bytes(body, 0)
    if len(bits) != 8:
        raise ValueError(f"a float of {len(bits)} bytes")
    value: float = struct.unpack(">d", bits)[0]
    return value


def _str(body: Any, _: int) -> str:
    return _bytes(body, 0).decode("utf-8", "surrogatepass")


def _bytes(body: Any, _: int) -> bytes:
    return bytes.fromhex(typed(str, body))


def _device(body: Any, _: int) -> torch.device:
    with suppress(RuntimeError):
        found = torch.device(typed(str, body))
        if str(found) == body:  # torch 2.13 takes "cuda:999" as another index
            return found
    raise ValueError(f"the device {body[:80]!r}")


def _scalar(body: Any, _: int) -> Any:
    described, digits = typed(list, body)
    buffer = memoryview(bytearray(_bytes(digits, 0)))
    return _ndarray((), dtype_from_json(described), buffer, "C")[()]


def _ndarray(shape: tuple[int, ...], dtype: Any, buffer: memoryview, order: str) -> Any:
    if math.prod(shape) * dtype.itemsize != buffer.nbytes:
        raise ValueError(f"{buffer.nbytes} bytes for {dtype!s:.80} of shape {shape}")
    return np.ndarray(shape, dtype, buffer, order="F" if order == "F" else "C")
