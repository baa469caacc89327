"""Files of a checkpoint: digested while they are written.

Nothing is read back. Reading: ``file_reader.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from pathlib import Path

from resumekit.errors import SaveError
from resumekit.storage import pipeline
from resumekit.storage.digest import (
    BlockDigester,
)
from resumekit.storage.io import FileSystem, save_errors
from resumekit.storage.pieces import COPY_BYTES, cut
from resumekit.storage.pipeline import Calls

WRITEBACK_BYTES = 8 << 20


@dataclass(frozen=True)
class FileEntry:
    """One line of the inventory.

    Args:
        path: relative to the step directory, parts joined by ``/``.
        size: in bytes.
        digest: 32 hexadecimal digits, see ``digest.py``.
        writer: the rank that wrote it.
    """

    path: str
    size: int
    digest: str
    writer: int


class FileWriter(AbstractContextManager["FileWriter"]):
    """A new file of a checkpoint in staging; unusable after the first error.

    A failed fsync is not repeated: Linux marks the pages clean, and a second one would succeed
    without the data being on disk (Rebello et al., USENIX ATC 2020).

    Args:
        file_system: the file system.
        path: must not exist.
        relative: its path in the step directory.
        writer: the rank that writes it.

    Raises:
        SaveError: it could not be created.
    """

    def __init__(self, file_system: FileSystem, path: Path, *, relative: str, writer: int) -> None:
        self._file_system = file_system
        self._path = path
        self._relative = relative
        self._writer = writer
        self._digester = BlockDigester()
        self._size = 0  # with bytes that are still being written
        self._written = 0
        self._hinted = 0
        with save_errors(path):
            self._handle: int | None = file_system.create(path)

    def write(self, buffers: Iterable[memoryview]) -> None:
        """Appends the bytes of C-contiguous buffers; they may be reused once this returns.

        They are taken as they are needed, so copies among them need the memory of one chunk.

        Raises:
            SaveError: names the file and the cause.
        """
        with self._open_handle() as handle:
            chunks = cut(buffers, self._size, pipeline.CHUNK_BYTES)
            for parts in chunks:
                if sum(part.nbytes for part in parts) == pipeline.CHUNK_BYTES:
                    self._write_copies(handle, chain([parts], chunks))
                else:  # a small file, or the rest of a chunk
                    self._digest(parts)
                    self._append(handle, parts)

    def write_image(self, image: memoryview) -> None:
        """Appends memory without a copy of it; it must not change until this returns.

        Args:
            image: flat and writable, such as the view of a ``HostBuffer``; direct I/O needs memory
                that begins at a multiple of 4096.

        Raises:
            SaveError: names the file and the cause.
        """
        with self._open_handle() as handle, Calls() as calls:
            for (chunk,) in cut([image], self._size, pipeline.CHUNK_BYTES):
                calls.wait(num_pending=1)
                calls.submit(partial(self._append, handle, [chunk]))
                self._digest([chunk])
            calls.wait()

    def _write_copies(self, handle: int, chunks: Iterable[list[memoryview]]) -> None:
        """Copies each chunk into aligned memory; writes it while it is digested."""
        with pipeline.ring.lent() as ring, Calls() as calls:
            for parts, memory in zip(chunks, cycle(ring), strict=False):
                calls.wait(num_pending=len(ring) - 1)
                chunk = self._gather(parts, memory)
                calls.submit(partial(self._append, handle, [chunk]))
            calls.wait()

    def _gather(self, parts: list[memoryview], memory: memoryview) -> memoryview:
        """The front of this memory, with digested copies of the parts."""
        copied = digested = 0
        for part in chain.from_iterable(cut(parts, 0, COPY_BYTES)):
            memory[copied : copied + part.nbytes] = part
            copied += part.nbytes
            if copied - digested >= COPY_BYTES:
                self._digest([memory[digested:copied]])
                digested = copied
        self._digest([memory[digested:copied]])
        return memory[:copied]

    def _digest(self, parts: list[memoryview]) -> None:
        for part in parts:
            self._digester.update(part)
            self._size += part.nbytes

    def _append(self, handle: int, parts: list[memoryview]) -> None:
        self._file_system.write(handle, parts)
        self._written += sum(part.nbytes for part in parts)
        if self._written - self._hinted >= WRITEBACK_BYTES:
            self._file_system.writeback(handle, self._hinted, self._written - self._hinted)
            self._hinted = self._written

    def finish(self) -> FileEntry:
        """The file's line in the inventory, once its bytes survive a power cut.

        Raises:
            SaveError: names the file and the cause.
        """
        with self._open_handle() as handle:
            self._file_system.fsync(handle)
            self._handle = None
            self._file_system.close(handle)
        return FileEntry(self._relative, self._size, self._digester.hexdigest(), self._writer)

    def discard(self) -> None:
        """Closes an unfinished file. It stays in staging, which is never read."""
        handle, self._handle = self._handle, None
        if handle is not None:
            with suppress(OSError):  # the caller raises the first error
                self._file_system.close(handle)

    @property
    def block_digests(self) -> tuple[str, ...]:
        """The digest of each 4 MiB block so far, as 32 hexadecimal digits."""
        return tuple(block.hex() for block in self._digester.blocks)

    @contextmanager
    def _open_handle(self) -> Iterator[int]:
        """The handle of an unfinished file; an error in the body is the file's last."""
        if self._handle is None:
            raise SaveError(str(self._path), found="is finished or has failed")
        try:
            with save_errors(self._path):
                yield self._handle
        except BaseException:
            self.discard()
            raise

    def __exit__(self, *_: object) -> None:
        self.discard()
