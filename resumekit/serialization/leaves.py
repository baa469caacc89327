"""Values as the bytes of a data file.

Nothing is copied before it is written. A tensor on another device, or one that is not contiguous,
is copied in chunks, so a save needs little memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from resumekit.serialization.dtypes import ELEMENT_TYPES, ElementType

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
