"""Copies of large pieces of memory, made by several threads at once.

torch's own threads get equal portions: with another process on one of two cores, its copy took
three times as long.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from resumekit.errors import SaveError
from resumekit.storage import ThreadedCalls

_PIECE_BYTES = 2 << 20
# A thread takes 0.1 ms to start, in which another one copies 2 MB; so this is worth it.
_BYTES_PER_THREAD = 32 << 20


class _Piece(NamedTuple):
    target: int
    address: int
    num_bytes: int
    source: torch.Tensor  # referred to until its bytes are copied


class ParallelCopies:
    """Copies from tensors into other memory, which ``run`` makes.

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
