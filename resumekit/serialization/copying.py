"""Copies the bytes of leaves into host memory, in the order in which a data file holds them.

Copies from a GPU run on a stream of their own, to pinned memory by themselves. They begin after all
that was launched before on the current stream of that GPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from resumekit.errors import SaveError
from resumekit.serialization.leaves import (
    CHUNK_BYTES,
    Leaf,
    buffers_of,
    chunks_of,
    flat_bytes,
    is_plain,
    pieces,
    stored_values,
)
from resumekit.storage import ThreadedCalls

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
        elif not (source.is_cpu and is_plain(source)):
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
