"""Values as the bytes of a data file: which element types there are, and how large values may be.

Nothing is copied before it is written. A tensor on another device, or one that is not contiguous,
is copied in chunks, so a save needs little memory.

The list of element types is part of the format: a name that is not in it is damage, a name that is
in it but that the running torch does not have needs a newer torch.

What a load refuses, a save has refused already: both go by the same limits.
"""

from __future__ import annotations

import collections
import math
import re
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

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
    return max(collections.Counter(map(hash, keys)).values()) > _MAX_EQUAL_HASHES


def namedtuple_type(name: Any, fields: Any) -> type[Any] | None:
    """A namedtuple type of this name and these fields; None where Python allows none."""
    names = [name, *fields] if isinstance(fields, list) else [name, fields]
    if not all(isinstance(item, str) and item.isidentifier() for item in names):
        return None
    if any(iskeyword(item) for item in names) or len(names) > _MAX_NAMEDTUPLE_FIELDS:
        return None
    if any(field.startswith("_") for field in fields) or len(set(fields)) != len(fields):
        return None
    made: type[Any] = collections.namedtuple(name, fields)  # type: ignore[misc]
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


# ---------------------------------------------------------------- element types


@dataclass(frozen=True)
class ElementType:
    """One element type of the format.

    Args:
        name: torch's name of it, without ``torch.``.
        num_bytes: the size of one element.
        code: its name in a safetensors header. None where stock readers do not know it: such a
            tensor stands there as ``U8`` with one more dimension, the bytes of an element.
    """

    name: str
    num_bytes: int
    code: str | None = None

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """The running torch's type; None where this torch has none of that name."""
        found = getattr(torch, self.name, None)
        return found if isinstance(found, torch.dtype) else None

    @property
    def dtype(self) -> torch.dtype:
        """The running torch's type, of an element type from ``known_element``."""
        assert self.torch_dtype is not None
        return self.torch_dtype


# With a code: what every safetensors since 0.4 reads. One code that a reader does not know makes it
# refuse the whole file, so the newer ones (C64, F8_E8M0, ...) are not used.
_TYPES = (
    ElementType("float64", 8, "F64"),
    ElementType("float32", 4, "F32"),
    ElementType("float16", 2, "F16"),
    ElementType("bfloat16", 2, "BF16"),
    ElementType("int64", 8, "I64"),
    ElementType("int32", 4, "I32"),
    ElementType("int16", 2, "I16"),
    ElementType("int8", 1, "I8"),
    ElementType("uint64", 8, "U64"),
    ElementType("uint32", 4, "U32"),
    ElementType("uint16", 2, "U16"),
    ElementType("uint8", 1, "U8"),
    ElementType("bool", 1, "BOOL"),
    ElementType("float8_e4m3fn", 1, "F8_E4M3"),
    ElementType("float8_e5m2", 1, "F8_E5M2"),
    ElementType("float8_e4m3fnuz", 1),
    ElementType("float8_e5m2fnuz", 1),
    ElementType("float8_e8m0fnu", 1),
    ElementType("float4_e2m1fn_x2", 1),
    ElementType("complex32", 4),
    ElementType("complex64", 8),
    ElementType("complex128", 16),
    ElementType("bits8", 1),
    ElementType("bits16", 2),
    ElementType("bits1x8", 1),
    ElementType("bits2x4", 1),
    ElementType("bits4x2", 1),
    *(ElementType(f"{sign}int{bits}", 1) for sign in ("", "u") for bits in range(1, 8)),
)

ELEMENT_TYPES: dict[str, ElementType] = {item.name: item for item in _TYPES}


# The values of these types that this torch has, by the name that ``str`` gives: a name in a file is
# looked up here and nowhere else.
TORCH_CONSTANTS = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format))
}


_BY_DTYPE = {item.torch_dtype: item for item in _TYPES}


def element_type(dtype: torch.dtype) -> ElementType | None:
    """The format's element type of a torch dtype; None where the format has none (quantised)."""
    return _BY_DTYPE.get(dtype)


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


# ---------------------------------------------------------------- bytes

CHUNK_BYTES = 4 << 20

# A type without arithmetic of its own (int4, float8, ...) is copied as one that has the same size.
PLAIN_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Leaf(NamedTuple):
    """Bytes to store, and how they are read as a tensor.

    Args:
        source: where the bytes come from.
        element: the type of one element.
        shape: the shape they are read with.
        strides: the strides of the tensor in memory, in elements, where it was dense but not
            row-major (channels_last, a transposed weight); the bytes are row-major all the same.
    """

    source: torch.Tensor | npt.NDArray[Any] | bytes
    element: ElementType
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """The number of bytes."""
        return math.prod(self.shape) * self.element.num_bytes

    def buffers(self) -> Iterator[memoryview]:
        """The bytes in order, in pieces of at most CHUNK_BYTES."""
        return buffers_of(self.source)

    @property
    def is_in_host_memory(self) -> bool:
        """Whether its bytes lie there as they are stored, so that ``buffers`` copies nothing."""
        if isinstance(self.source, torch.Tensor):
            return self.source.is_cpu and is_plain(self.source)
        return isinstance(self.source, bytes) or self.source.flags.c_contiguous


def buffers_of(source: torch.Tensor | npt.NDArray[Any] | bytes) -> Iterator[memoryview]:
    """The bytes of a value in row-major order, in pieces of at most CHUNK_BYTES."""
    if isinstance(source, torch.Tensor):
        return _tensor_buffers(source)
    if isinstance(source, bytes):
        return pieces(memoryview(source))
    return _array_buffers(source)


def bytes_leaf(source: npt.NDArray[Any] | bytes) -> Leaf:
    """A leaf of plain bytes: of a bytes object, or of an array in row-major order."""
    num_bytes = source.nbytes if isinstance(source, np.ndarray) else len(source)
    return Leaf(source, ELEMENT_TYPES["uint8"], (num_bytes,))


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie in memory as they are stored."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor of this shape, as torch counts them."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def retyped(
    source: torch.Tensor,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    """A tensor over the same storage with another type and geometry; shares memory, has no grad.

    Args:
        source: the tensor whose storage is used.
        dtype: the element type.
        offset: where it begins in the storage, in elements of ``dtype``.
        shape: the shape.
        strides: in elements of ``dtype``.
    """
    empty = torch.empty(0, dtype=dtype, device=source.device)
    return empty.set_(source.untyped_storage(), offset, shape, strides)


class _Memory:
    """A tensor's memory under numpy's array interface.

    Not through ``Tensor.numpy()``: that marks the live storage as not resizable for ever (torch
    2.13, torch/csrc/utils/tensor_numpy.cpp), and FSDP frees its storages by resizing them.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # lives as long as any view of its memory
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (tensor.numel() * tensor.element_size(),),
            "data": (tensor.data_ptr(), False),
        }


def flat_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return _view(np.asarray(_Memory(tensor)))


def _view(array: npt.NDArray[Any]) -> memoryview:
    return memoryview(array)  # type: ignore[arg-type]  # a Buffer for type checkers from 3.12 on


def pieces(buffer: memoryview) -> Iterator[memoryview]:
    """Flat memory in pieces of at most CHUNK_BYTES."""
    for begin in range(0, buffer.nbytes, CHUNK_BYTES):
        yield buffer[begin : begin + CHUNK_BYTES]


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements without grad, of a type that is copied bit for bit; shares memory."""
    if tensor.is_conj() or tensor.is_neg():  # lazy bits: the memory holds something else
        return tensor.detach()
    plain = PLAIN_TYPES[tensor.element_size()]
    shape, strides = tuple(tensor.shape), tensor.stride()
    return retyped(tensor, plain, int(tensor.storage_offset()), shape, strides)


def _tensor_buffers(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel() == 0:
        return
    if tensor.is_cpu and is_plain(tensor):
        yield from pieces(flat_bytes(tensor))
    else:
        yield from _copied(stored_values(tensor), _tensor_bytes)


def _tensor_bytes(tensor: torch.Tensor) -> memoryview:
    return flat_bytes(tensor.resolve_conj().resolve_neg().contiguous().cpu())


def _array_buffers(array: npt.NDArray[Any]) -> Iterator[memoryview]:
    if array.nbytes == 0:
        return
    if array.flags.c_contiguous:
        yield from pieces(_array_bytes(array))
    else:
        yield from _copied(array, _array_bytes)


def _array_bytes(array: npt.NDArray[Any]) -> memoryview:
    return _view(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _copied(source: Any, bytes_of: Callable[[Any], memoryview]) -> Iterator[memoryview]:
    """The bytes of a tensor or array that cannot be handed out as it lies, a chunk at a time."""
    for chunk in chunks_of(source, CHUNK_BYTES):
        yield from pieces(bytes_of(chunk))


def chunks_of(source: Any, num_bytes: int) -> Iterator[Any]:
    """Views of a tensor or array, consecutive in row-major order, of at most so many bytes each."""
    if source.nbytes <= num_bytes or source.ndim == 0:  # an element of an array may be longer
        yield source
        return
    num_rows = num_bytes * source.shape[0] // source.nbytes
    if num_rows == 0:
        for index in range(source.shape[0]):
            # With the ellipsis, an array also where it has no dimension left, not numpy's scalar.
            yield from chunks_of(source[index, ...], num_bytes)
        return
    for begin in range(0, source.shape[0], num_rows):
        yield source[begin : begin + num_rows]
