"""Copies of large pieces of memory, made by several threads at once.

The threads start with the copies and end with them: there is nothing that a fork or the exit of the
process could find. Each takes the next piece when it is done with one, so a core on which something
else runs delays the others by one piece at most. torch's own threads get equal portions instead:
with another process on one of two cores, its copy took three times as long.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from contextlib import suppress

import torch

from resumekit.errors import SaveError

_PIECE_BYTES = 2 << 20
# A thread takes 0.1 ms to start, in which another one copies 2 MB; so this is worth it.
_BYTES_PER_THREAD = 32 << 20


class ParallelCopies:
    """Copies from tensors into other memory, which ``run`` makes.

    Args:
        target: the memory, which is kept as long as a thread copies.
        num_threads: how many copy at most, the caller's thread among them.
    """

    def __init__(self, target: torch.Tensor, *, num_threads: int) -> None:
        self._target = target
        self._num_threads = num_threads
        self._pieces: deque[tuple[int, int, int, torch.Tensor]] = deque()
        self._num_bytes = 0
        self._finished: list[int] = []  # one entry for each thread that has found no more pieces

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
            self._pieces.append((target + offset, address + offset, length, source))
        self._num_bytes += num_bytes

    def run(self) -> None:
        """Makes all copies.

        Raises:
            SaveError: not all bytes were copied.
        """
        num_helpers = min(self._num_threads, self._num_bytes // _BYTES_PER_THREAD) - 1
        helpers: list[threading.Thread] = []
        try:
            with suppress(RuntimeError):  # at exit since Python 3.12, or there are too many
                for _ in range(num_helpers):
                    helper = threading.Thread(target=self._work, name="resumekit-copy", daemon=True)
                    helper.start()
                    helpers.append(helper)
            self._work()
        finally:
            self._pieces.clear()  # after an interrupt
            for helper in helpers:
                helper.join()
        if len(self._finished) != len(helpers) + 1:
            raise SaveError("the copy of the state", found="a thread that has failed")

    def _work(self) -> None:
        pieces, copy = self._pieces, ctypes.memmove  # which releases the interpreter's lock
        with suppress(IndexError):  # there are no more
            while True:
                # The source is referred to until its bytes are copied.
                target, address, num_bytes, _source = pieces.popleft()
                copy(target, address, num_bytes)
        self._finished.append(1)
