"""A local file system that reports how much it has read and written, for a progress display."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from resumekit.storage.io import LocalFileSystem, ReadHandle

# Takes the bytes of one call. The threads that read and write call it, possibly at the same time.
Observer: TypeAlias = Callable[[int], None]


class ObservedFileSystem(LocalFileSystem):
    """The operating system's calls; an observer gets the size of each read and write."""

    def __init__(self) -> None:
        super().__init__()
        self._observer: Observer | None = None

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """Calls the observer while the body runs."""
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None

    def write(self, handle: int, buffers: Sequence[memoryview]) -> None:
        super().write(handle, buffers)
        self._report(sum(buffer.nbytes for buffer in buffers))

    def read_into(self, handle: ReadHandle, offset: int, buffer: memoryview) -> int:
        num_bytes = super().read_into(handle, offset, buffer)
        self._report(num_bytes)
        return num_bytes

    def _report(self, num_bytes: int) -> None:
        observer = self._observer
        if observer is not None:
            observer(num_bytes)
