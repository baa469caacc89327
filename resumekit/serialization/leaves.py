"""Values as the bytes of a data file: which element types there are, and how the bytes are copied.

Nothing is copied before it is written. A tensor on another device, or one that is not contiguous,
is copied in chunks, so a save needs little memory.

The list of element types is part of the format: a name that is not in it is damage, a name that is
in it but that the running torch does not have needs a newer torch.

Copies from a GPU run on a stream of their own, to pinned memory by themselves. They begin after all
that was launched before on the current stream of that GPU.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from resumekit.errors import SaveError
from resumekit.storage.io.pipeline import ThreadedCalls

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
        return _lies_as_stored(self.source)


def buffers_of(source: torch.Tensor | npt.NDArray[Any] | bytes) -> Iterator[memoryview]:
    """The bytes of a value in row-major order, in pieces of at most CHUNK_BYTES."""
    if isinstance(source, bytes):
        source = np.frombuffer(source, np.uint8)
    if not source.nbytes:
        return
    chunks: Iterable[Any] = [source] if _lies_as_stored(source) else _copied_chunks(source)
    for chunk in chunks:
        is_tensor = isinstance(chunk, torch.Tensor)
        yield from pieces(
            flat_bytes(chunk) if is_tensor else _view(chunk.reshape(-1).view(np.uint8))
        )


def _lies_as_stored(source: torch.Tensor | npt.NDArray[Any] | bytes) -> bool:
    if isinstance(source, torch.Tensor):
        return source.is_cpu and is_plain(source)
    return isinstance(source, bytes) or source.flags.c_contiguous


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


def _copied_chunks(source: torch.Tensor | npt.NDArray[Any]) -> Iterator[Any]:
    """What cannot be handed out as it lies, a chunk at a time."""
    if not isinstance(source, torch.Tensor):
        yield from map(np.ascontiguousarray, chunks_of(source, CHUNK_BYTES))
        return
    for chunk in chunks_of(stored_values(source), CHUNK_BYTES):
        yield chunk.resolve_conj().resolve_neg().contiguous().cpu()


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


# ---------------------------------------------------------------- copies of leaves in host memory

# From here on several threads copy; below, to hand a copy over costs more than the copy.
_LARGE_BYTES = 256 << 10

# Unlike ctypes.memmove this keeps the interpreter's lock: a thread that computes in Python would
# hold it for 5 ms after each of many small tensors.
_move_small = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)

_PIECE_BYTES = 4 << 20  # from 4 to 16 MB it makes no difference; at 2 MB a copy took 3 % longer
# A thread takes 0.1 ms to start, in which another one copies 2 MB; so this is worth it.
_BYTES_PER_THREAD = 32 << 20

_BLOCK_BYTES = 16 << 20  # in pinned memory of torch, which rounds sizes up to a power of two
_NUM_AHEAD = 2  # blocks that are copied while the one before them is used


class Image:
    """Host memory that receives the bytes of a data file.

    Args:
        memory: writable and contiguous, as long as the file at least.
        num_threads: how many copy large tensors, the caller's thread among them.
    """

    def __init__(self, memory: memoryview, *, num_threads: int) -> None:
        self._memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._large = ParallelCopies(self._bytes, num_threads=num_threads)
        self._tensors = TensorCopies()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """The body calls ``copy``; the bytes are there once the context ends.

        Raises:
            SaveError: not all bytes were copied.
        """
        with self._tensors.launching():
            yield
        try:
            self._large.run()
        finally:
            self._tensors.wait()

    def copy(
        self, source: torch.Tensor | npt.NDArray[Any] | bytes, begin: int, num_bytes: int
    ) -> None:
        """Copies the bytes of a value in row-major order; some at the end of ``copying``.

        Args:
            source: its bytes are as many as ``num_bytes``.
            begin: where the first one goes.
            num_bytes: how many there are.
        """
        if num_bytes == 0:
            return
        if not isinstance(source, torch.Tensor):
            for piece in buffers_of(source):
                self._memory[begin : begin + piece.nbytes] = piece
                begin += piece.nbytes
        elif not _lies_as_stored(source):
            self._tensors.add(stored_values(source), self._bytes[begin : begin + num_bytes])
        elif num_bytes < _LARGE_BYTES:
            _move_small(self._address + begin, source.data_ptr(), num_bytes)
        else:
            self._large.add(source, begin, num_bytes)


class TensorCopies:
    """Copies of tensors that do not lie in host memory as they are stored."""

    def __init__(self) -> None:
        self._entered = ExitStack()
        self._devices: set[torch.device] = set()
        self._waits: list[Callable[[], object]] = []

    @contextmanager
    def launching(self) -> Iterator[None]:
        """The body adds copies; those from a GPU are done once ``wait`` returns."""
        try:
            with self._entered:
                yield
        except BaseException:
            self.wait()  # the memory may end with the error
            raise

    def add(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Copies a tensor's elements in row-major order.

        Args:
            values: from ``stored_values``.
            target: of as many bytes.
        """
        if not values.is_cuda:
            target.view(values.dtype).view(values.shape).copy_(values)
            return
        self._enter_stream(values.device)
        # What does not lie as it is stored needs memory of the GPU, where there may be little left.
        begin = 0
        for chunk in [values] if is_plain(values) else chunks_of(values, CHUNK_BYTES):
            end = begin + chunk.nbytes
            target[begin:end].copy_(_bytes_of(chunk), non_blocking=True)
            begin = end

    def wait(self) -> None:
        """Waits until all copies are done."""
        for wait in self._waits:
            wait()

    def _enter_stream(self, device: torch.device) -> None:
        if device in self._devices:
            return
        self._devices.add(device)
        stream = _side_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        # The device first: the end of ``stream`` would select the one before, and create a context.
        self._entered.enter_context(torch.cuda.device(device))
        self._entered.enter_context(torch.cuda.stream(stream))
        self._entered.callback(lambda: self._waits.append(stream.record_event().synchronize))


def _bytes_of(values: torch.Tensor) -> torch.Tensor:
    """The bytes as they are stored, on the same device."""
    # torch 2.13 aten/src/ATen/native/cuda/Copy.cu copies a lazy bit too, and then changes the host
    # memory at once, before the bytes are there.
    return values.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


_WORD_MASK = 0xFFFFFFFF
# Odd multipliers with well mixed bits (splitmix64), as signed words.
_MIX, _STEP = 0xBF58476D1CE4E5B9 - 2**64, 0x9E3779B97F4A7C15 - 2**64


@torch.no_grad()
def digest_on_devices(tensors: Iterable[torch.Tensor]) -> tuple[int, ...] | None:
    """A digest of the elements of tensors, computed where they are: one number for each device.

    It changes with the bytes: 64 bits for each device. One block at a time takes up memory there.

    Returns:
        The numbers; None where a device has no memory for it, or lacks an operation.
    """
    digests: dict[torch.device, torch.Tensor] = {}
    positions: dict[torch.device, torch.Tensor] = {}
    try:
        for tensor in tensors:
            for chunk in chunks_of(stored_values(tensor), _BLOCK_BYTES):
                device, flat = chunk.device, _bytes_of(chunk)
                words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(torch.int64)
                if device not in positions:
                    digests[device] = torch.zeros((), dtype=torch.int64, device=device)
                    positions[device] = torch.arange(1, _BLOCK_BYTES // 8 + 1, device=device)
                    positions[device] *= _STEP
                # Never in place here: no backend has to copy what it does not pad. Of two equal
                # words the order counts.
                words = words + positions[device][: words.numel()]
                words ^= (words >> 32).bitwise_and_(_WORD_MASK)
                words *= _MIX
                words ^= (words >> 32).bitwise_and_(_WORD_MASK)
                digests[device] = digests[device] * _STEP + words.sum()
        return tuple(int(each) for each in digests.values())
    except RuntimeError:
        return None


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process: torch keeps freed memory for the stream that it was allocated on."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch 2.13


def pieces_of(leaves: Iterable[Leaf]) -> Iterator[memoryview]:
    """The bytes of leaves in order, in pieces of at most CHUNK_BYTES.

    What does not lie in host memory as it is stored is copied by blocks, those from a GPU while the
    caller uses the blocks before.
    """
    ahead: deque[Iterator[memoryview]] = deque()
    for begun in _begun(leaves):
        ahead.append(begun)
        if len(ahead) > _NUM_AHEAD:
            yield from ahead.popleft()
    while ahead:
        yield from ahead.popleft()


def _begun(leaves: Iterable[Leaf]) -> Iterator[Iterator[memoryview]]:
    """The pieces of leaves and of blocks of leaves; the copy of a block has begun."""
    for device, group in groupby(leaves, key=_device_to_copy_from):
        if device is None:
            yield from (leaf.buffers() for leaf in group)
        else:
            yield from map(_copied_together, _blocks_of(leaf.source for leaf in group))


def _device_to_copy_from(leaf: Leaf) -> torch.device | None:
    if not isinstance(leaf.source, torch.Tensor) or leaf.is_in_host_memory:
        return None
    return leaf.source.device


def _blocks_of(tensors: Iterable[Any]) -> Iterator[list[torch.Tensor]]:
    """Parts of tensors in order, in lists of at most ``_BLOCK_BYTES``."""
    block: list[torch.Tensor] = []
    num_bytes = 0
    for tensor in (each for each in tensors if each.numel()):
        for part in chunks_of(stored_values(tensor), _BLOCK_BYTES):
            if num_bytes + part.nbytes > _BLOCK_BYTES:
                yield block
                block, num_bytes = [], 0
            block.append(part)
            num_bytes += part.nbytes
    if block:
        yield block


def _copied_together(parts: list[torch.Tensor]) -> Iterator[memoryview]:
    """Begins to copy them; the first piece waits for all."""
    # New for each block: the caller may keep a piece, and torch reuses the memory once it is free.
    num_bytes = sum(part.nbytes for part in parts)
    is_pinned = parts[0].is_cuda
    memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    copies, end = TensorCopies(), 0
    with copies.launching():
        for part in parts:
            begin, end = end, end + part.nbytes
            copies.add(part, memory[begin:end])
    return _awaited(copies, memory)


def _awaited(copies: TensorCopies, memory: torch.Tensor) -> Iterator[memoryview]:
    copies.wait()
    yield from pieces(flat_bytes(memory))


class _Piece(NamedTuple):
    target: int
    address: int
    num_bytes: int
    source: torch.Tensor  # referred to until its bytes are copied


class ParallelCopies:
    """Copies from tensors into other memory, made by several threads in ``run``.

    torch's own threads get equal portions: with another process on one of two cores, its copy took
    three times as long.

    Args:
        target: the memory, which is kept as long as a thread copies.
        num_threads: how many copy at most, the caller's thread among them.
    """

    def __init__(self, target: torch.Tensor, *, num_threads: int) -> None:
        self._target = target
        self._num_threads = num_threads
        self._pieces: list[_Piece] = []
        self._num_bytes = 0

    def add(self, source: torch.Tensor, begin: int, num_bytes: int) -> None:
        """Adds a copy.

        Args:
            source: contiguous and in host memory; its bytes are as many as ``num_bytes``.
            begin: where the first byte goes.
            num_bytes: how many there are.
        """
        target, address = self._target.data_ptr() + begin, source.data_ptr()
        for offset in range(0, num_bytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, num_bytes - offset)
            self._pieces.append(_Piece(target + offset, address + offset, length, source))
        self._num_bytes += num_bytes

    def run(self) -> None:
        """Makes all copies.

        Raises:
            SaveError: not all bytes were copied.
        """
        # The caller's thread is one of them.
        num_helpers = min(self._num_threads, self._num_bytes // _BYTES_PER_THREAD) - 1
        try:
            ThreadedCalls(_copy, self._pieces, num_threads=num_helpers).results()
        except MemoryError as error:
            raise SaveError("the copy of the state", found="a thread that has failed") from error


def _copy(piece: _Piece) -> None:
    ctypes.memmove(piece.target, piece.address, piece.num_bytes)  # without the interpreter's lock
