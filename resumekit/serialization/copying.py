"""Copies the bytes of leaves into host memory, in the order in which a data file holds them."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from resumekit.errors import SaveError
from resumekit.serialization.leaves import PLAIN_TYPES, buffers_of, is_plain, retyped
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
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def copy(
        self, source: torch.Tensor | npt.NDArray[Any] | bytes, begin: int, num_bytes: int
    ) -> None:
        """Copies the bytes of a value in row-major order; some of them by ``wait`` only.

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
            self._copy_tensor(source, self._bytes[begin : begin + num_bytes])
        elif num_bytes < _LARGE_BYTES:
            _move_small(self._address + begin, source.data_ptr(), num_bytes)
        else:
            self._large.add(source, begin, num_bytes)

    def wait(self) -> None:
        """Returns when all copies are done.

        Raises:
            SaveError: not all bytes were copied.
        """
        self._large.run()
        for stream in self._streams.values():
            stream.record_event().synchronize()

    def _copy_tensor(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.is_conj() or source.is_neg():  # lazy bits: the memory holds something else
            values = source.detach()
        else:
            shape, strides = tuple(source.shape), source.stride()
            plain = PLAIN_TYPES[source.element_size()]
            values = retyped(source, plain, int(source.storage_offset()), shape, strides)
        target = target.view(values.dtype).view(values.shape)
        if values.is_cuda:
            with torch.cuda.stream(self._side_stream(values.device)):
                target.copy_(values, non_blocking=True)
        else:
            target.copy_(values)

    def _side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """A stream that begins after what has been launched so far."""
        if device not in self._streams:
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch 2.13
            stream.wait_stream(torch.cuda.current_stream(device))
            self._streams[device] = stream
        return self._streams[device]


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
