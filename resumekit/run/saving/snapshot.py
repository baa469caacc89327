"""Host memory for a copy of what a rank writes: allocated once and reused by all its saves."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

from resumekit.errors import SaveError
from resumekit.run.saving.available_memory import available_memory
from resumekit.run.saving.frozen_links import AnyPayload
from resumekit.run.saving.pinned_memory import snapshot_buffer
from resumekit.storage import HostBuffer

_SPARE = 64  # a 64th more than needed: a list in the state that grows must not cost new pages
_LEFT_FREE = 10  # a tenth of the available memory stays free for the training


class Snapshot:
    """One copy of a rank's state at a time; its memory is reused, and grows with the state.

    The memory is allocated by the first ``take``. A forked child does not have it.

    Args:
        root: of the file system in which the limits of memory are read.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._buffer: HostBuffer | None = None
        forget = weakref.WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: (forget() or _nothing)())

    @property
    def num_bytes(self) -> int:
        """The memory that it takes up."""
        return 0 if self._buffer is None else self._buffer.num_bytes

    @staticmethod
    def needed_bytes(payloads: Sequence[AnyPayload]) -> int:
        """The memory that a copy of them takes up."""
        return sum(each.image_bytes for each in payloads)

    def fits(self, num_bytes: int, others: int = 0) -> bool:
        """Whether there is memory for a copy, so that a tenth of what is available stays free.

        Args:
            num_bytes: of the copy.
            others: bytes by which the snapshots of the other ranks on this node will grow.
        """
        growth = self.growth(num_bytes) + others
        if growth == 0:
            return True
        available = available_memory(self._root)
        return available is not None and growth <= available - available // _LEFT_FREE

    def growth(self, num_bytes: int) -> int:
        """How many bytes more than now a copy of this size will take up."""
        return _with_spare(num_bytes) - self.num_bytes if num_bytes > self.num_bytes else 0

    def take(self, payloads: Sequence[AnyPayload], *, num_threads: int = 1) -> None:
        """Copies them; the live state may change once this returns.

        Args:
            payloads: not written yet; those of the ``take`` before are written.
            num_threads: how many copy large tensors, the caller's thread among them.

        Raises:
            SaveError: there is no memory for the copy, or not all bytes were copied.
        """
        needed = self.needed_bytes(payloads)
        if needed > self.num_bytes:
            self.release()
            self._allocate(_with_spare(needed))
        view = memoryview(b"") if self._buffer is None else self._buffer.view
        begin = 0
        for each in payloads:
            end = begin + each.image_bytes
            each.copy_into(view[begin:end], num_threads=num_threads)
            begin = end

    def lend(self, num_bytes: int) -> HostBuffer:
        """Its memory for something else, until the next ``take``.

        Args:
            num_bytes: at least.

        Raises:
            SaveError: there is no memory.
        """
        if num_bytes > self.num_bytes:
            self.release()
            self._allocate(_with_spare(num_bytes))
        assert self._buffer is not None
        return self._buffer

    def release(self) -> None:
        """Gives the memory back, the part that is still in use with its last user."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.release()

    def _allocate(self, num_bytes: int) -> None:
        try:
            self._buffer = snapshot_buffer(num_bytes)
        except OSError as error:
            raise SaveError(
                "the snapshot of an asynchronous save",
                found=f"no {num_bytes:,} bytes of memory: {error.strerror}",
                remedy="Pass async_save=False",
            ) from error

    def _forget(self) -> None:
        # In a forked child, which does not have the memory: others may get its addresses.
        self._buffer = None


def _with_spare(num_bytes: int) -> int:
    return num_bytes + num_bytes // _SPARE


def _nothing() -> None:
    pass
