"""A leaf: one stretch of bytes for the data file, still in the memory of its live owner.

Nothing is copied before it is written. What cannot be handed out as it lies in memory (a tensor on
another device, one that is not contiguous) is copied in chunks, so a save needs little memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from resumekit.serialization.dtypes import ELEMENT_TYPES, ElementType

CHUNK_BYTES = 4 << 20

# A type without arithmetic of its own (int4, float8, ...) is copied as one that has the same size.
PLAIN_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@dataclass(frozen=True)
class Leaf:
    """Bytes to be stored, and how they are read again as a tensor.

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
        """The length of the stretch."""
        return math.prod(self.shape) * self.element.num_bytes

    def buffers(self) -> Iterator[memoryview]:
        """The bytes in order, in pieces of at most CHUNK_BYTES."""
        return buffers_of(self.source)


def buffers_of(source: torch.Tensor | npt.NDArray[Any] | bytes) -> Iterator[memoryview]:
    """The bytes of a value in row-major order, in pieces of at most CHUNK_BYTES."""
    if isinstance(source, torch.Tensor):
        return _tensor_buffers(source)
    if isinstance(source, bytes):
        return _pieces(memoryview(source))
    return _array_buffers(source)


def bytes_leaf(source: npt.NDArray[Any] | bytes) -> Leaf:
    """A leaf of plain bytes: of a bytes object, or of an array in row-major order."""
    num_bytes = source.nbytes if isinstance(source, np.ndarray) else len(source)
    return Leaf(source, ELEMENT_TYPES["uint8"], (num_bytes,))


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
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


def _pieces(buffer: memoryview) -> Iterator[memoryview]:
    for begin in range(0, buffer.nbytes, CHUNK_BYTES):
        yield buffer[begin : begin + CHUNK_BYTES]


def _tensor_buffers(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.numel() == 0:
        return
    if tensor.is_conj() or tensor.is_neg():  # lazy bits: the memory holds something else
        yield from _copied(tensor.detach())
    elif tensor.device.type == "cpu" and tensor.is_contiguous():
        yield from _pieces(flat_bytes(tensor))
    else:
        plain = PLAIN_TYPES[tensor.element_size()]
        shape, strides = tuple(tensor.shape), tensor.stride()
        yield from _copied(retyped(tensor, plain, int(tensor.storage_offset()), shape, strides))


def _copied(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor that cannot be handed out as it lies, a chunk at a time."""
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes <= CHUNK_BYTES:
        yield flat_bytes(tensor.resolve_conj().resolve_neg().contiguous().cpu())
        return
    num_rows = CHUNK_BYTES * tensor.shape[0] // num_bytes
    if num_rows == 0:
        for row in tensor:
            yield from _copied(row)
        return
    for begin in range(0, tensor.shape[0], num_rows):
        yield from _copied(tensor[begin : begin + num_rows])


def _array_buffers(array: npt.NDArray[Any]) -> Iterator[memoryview]:
    if array.nbytes == 0:
        return
    if array.flags.c_contiguous:
        yield from _pieces(_view(array.reshape(-1).view(np.uint8)))
    elif array.nbytes <= CHUNK_BYTES:
        yield from _array_buffers(np.ascontiguousarray(array))
    else:
        num_rows = max(1, CHUNK_BYTES * array.shape[0] // array.nbytes)
        for begin in range(0, array.shape[0], num_rows):
            rows = array[begin : begin + num_rows]
            yield from _array_buffers(rows if rows.nbytes <= CHUNK_BYTES else rows[0])
