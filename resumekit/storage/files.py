"""Files of a checkpoint: digested while they are written, verified while they are read.

A writer never reads back: it digests the bytes while they are being written. A reader returns no
byte before its block's digest was compared, and reads no byte twice when it is used from front to
back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle
from pathlib import Path

import xxhash

from resumekit.errors import CorruptCheckpointError, SaveError
from resumekit.storage import pipeline
from resumekit.storage.digest import (
    BLOCK_BYTES,
    BlockDigester,
    combine,
    is_digest,
)
from resumekit.storage.io import FileSystem, read_errors, read_fully, save_errors
from resumekit.storage.pipeline import Calls

WRITEBACK_BYTES = 8 << 20
MAX_READ_BYTES = 1 << 30
_COPY_BYTES = 256 << 10  # at a time: digested from the CPU's cache; copies block other threads
_NUM_THREADS = 2
_MANY_BLOCKS = 16  # from here on, two threads pay off


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
        for part in chain.from_iterable(cut(parts, 0, _COPY_BYTES)):
            memory[copied : copied + part.nbytes] = part
            copied += part.nbytes
            if copied - digested >= _COPY_BYTES:
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


class FileReader(AbstractContextManager["FileReader"]):
    """A file of a checkpoint that returns verified bytes only.

    Args:
        file_system: the file system.
        path: the file.
        where: what error messages call it.
        entry: its line in the manifest.

    Raises:
        CorruptCheckpointError: it has another size than the manifest says.
        UnreadableCheckpointError: it could not be opened.
    """

    def __init__(
        self, file_system: FileSystem, path: Path, *, where: str, entry: FileEntry
    ) -> None:
        self.entry = entry
        self._file_system = file_system
        self._where = where
        self._expected: list[bytes] = []
        self._checked: Sequence[str] | None = None
        self._block = bytearray()
        self._block_index = -1
        self._closed = False
        with read_errors(where):
            self._handle = file_system.open(path)
        if self._handle.size != entry.size:
            self.close()
            raise CorruptCheckpointError(
                where,
                found=f"has {self._handle.size} bytes",
                expected=f"{entry.size} as the manifest says",
            )

    def read(self, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """All bytes, verified against the manifest.

        Raises:
            CorruptCheckpointError: the digest differs, or there are more than ``max_bytes``.
            UnreadableCheckpointError: they could not be read.
        """
        if self.entry.size > max_bytes:
            raise CorruptCheckpointError(
                self._where, found=f"has {self.entry.size} bytes", expected=f"at most {max_bytes}"
            )
        content = bytearray(self.entry.size)
        rest = memoryview(content)
        self._read_all(rest[begin : begin + BLOCK_BYTES] for begin in self._block_offsets)
        return bytes(content)

    def read_into(
        self, buffers: Sequence[memoryview], offset: int, block_digests: Sequence[str]
    ) -> None:
        """Fills C-contiguous buffers with consecutive bytes of the file, all verified.

        Whole blocks are read directly into the buffers, many of them by two threads. A partly
        wanted one is read whole and kept for the next call.

        Args:
            buffers: writable memory, one after the other in the file.
            offset: where in the file the first one begins.
            block_digests: of all blocks of the file; verified against the manifest.

        Raises:
            CorruptCheckpointError: names the file and both digests, or both sizes.
            UnreadableCheckpointError: the bytes could not be read.
        """
        self._check_blocks(block_digests)
        end = offset + sum(buffer.nbytes for buffer in buffers)
        if offset < 0 or end > self.entry.size:
            raise CorruptCheckpointError(
                self._where,
                found=f"bytes {offset} to {end} are wanted",
                expected=f"a range within its {self.entry.size} bytes",
            )
        whole = []
        for parts in cut(buffers, offset, BLOCK_BYTES):
            num_bytes = sum(part.nbytes for part in parts)
            index, start = divmod(offset, BLOCK_BYTES)
            if num_bytes == self._block_size(index):
                whole.append((parts, index))
            else:
                self._copy_from_block(parts, index, start)
            offset += num_bytes
        self._read_blocks(whole)

    def verify(self) -> None:
        """Reads every byte and compares the digest.

        Raises:
            CorruptCheckpointError: names the file and both digests.
            UnreadableCheckpointError: the bytes could not be read.
        """
        block = memoryview(bytearray(min(BLOCK_BYTES, self.entry.size)))
        self._read_all(block[: self.entry.size - begin] for begin in self._block_offsets)

    def close(self) -> None:
        """Closes the file; may be called more than once."""
        if not self._closed:
            self._closed = True
            with suppress(OSError):  # nothing was written
                self._file_system.close(self._handle)

    def _check_blocks(self, block_digests: Sequence[str]) -> None:
        if block_digests is self._checked:
            return
        blocks = [_raw_digest(text, self._where) for text in block_digests]
        if len(blocks) != len(self._block_offsets):
            raise CorruptCheckpointError(
                self._where,
                found=f"the index holds {len(blocks)} block digests",
                expected=str(len(self._block_offsets)),
            )
        self._compare(combine(blocks), self.entry.digest, of="the digest of the index's blocks")
        self._expected = blocks
        self._checked = block_digests

    def _copy_from_block(self, parts: list[memoryview], index: int, start: int) -> None:
        self._keep_block(index)
        block = memoryview(self._block)
        for part in parts:
            part[:] = block[start : start + part.nbytes]
            start += part.nbytes

    def _keep_block(self, index: int) -> None:
        if index == self._block_index:
            return
        self._block_index = -1
        self._block = self._block or bytearray(min(BLOCK_BYTES, self.entry.size))
        self._read_known_block([memoryview(self._block)[: self._block_size(index)]], index)
        self._block_index = index

    def _read_all(self, blocks: Iterable[memoryview]) -> None:
        """Reads the whole file into these blocks, one after the other, and verifies it."""
        digests = [self._read_block([block], index) for index, block in enumerate(blocks)]
        self._compare(combine(digests), self.entry.digest)

    def _read_blocks(self, blocks: Sequence[tuple[list[memoryview], int]]) -> None:
        # Most of the time goes into pages that are touched for the first time, and one core alone
        # does that more slowly than a disk delivers: 1.49 GB took 0.8 s by two threads, 2.0 s by
        # one.
        if len(blocks) < _MANY_BLOCKS:
            for parts, index in blocks:
                self._read_known_block(parts, index)
            return
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="resumekit-read") as pool:
            for _ in pool.map(self._read_known_block, *zip(*blocks, strict=True)):
                pass

    def _read_known_block(self, parts: list[memoryview], index: int) -> None:
        found, expected = self._read_block(parts, index), self._expected[index]
        self._compare(found.hex(), expected.hex(), of=f"the digest of its block {index}")

    def _read_block(self, parts: list[memoryview], index: int) -> bytes:
        """Fills parts that make up one block; returns its digest."""
        offset = index * BLOCK_BYTES
        digester = xxhash.xxh3_128()
        for part in parts:
            self._fill(part, offset)
            digester.update(part)
            offset += part.nbytes
        return digester.digest()

    @property
    def _block_offsets(self) -> range:
        return range(0, self.entry.size, BLOCK_BYTES)

    def _block_size(self, index: int) -> int:
        return min(BLOCK_BYTES, self.entry.size - index * BLOCK_BYTES)

    def _fill(self, buffer: memoryview, offset: int) -> None:
        with read_errors(self._where):
            if offset == 0:
                self._file_system.advise_sequential(self._handle)
            num_bytes = read_fully(self._file_system, self._handle, offset, buffer)
        if num_bytes < buffer.nbytes:
            raise CorruptCheckpointError(
                self._where,
                found=f"ends after {offset + num_bytes} bytes",
                expected=f"{self.entry.size} as the manifest says",
            )

    def _compare(self, found: str, expected: str, *, of: str = "its digest") -> None:
        if found != expected:
            raise CorruptCheckpointError(
                self._where, found=f"{of} is {found}", expected=f"{expected} as recorded"
            )

    def __exit__(self, *_: object) -> None:
        self.close()


def cut(buffers: Iterable[memoryview], offset: int, chunk_bytes: int) -> Iterator[list[memoryview]]:
    """The same bytes as flat pieces, one list for each chunk of the file.

    Args:
        buffers: C-contiguous memory.
        offset: where in the file the first one begins.
        chunk_bytes: chunks begin at its multiples.
    """
    parts: list[memoryview] = []
    room = chunk_bytes - offset % chunk_bytes
    for buffer in buffers:
        rest = _flat(buffer)
        while rest.nbytes:
            part, rest = rest[:room], rest[room:]
            parts.append(part)
            room -= part.nbytes
            if room == 0:
                yield parts
                parts, room = [], chunk_bytes
    if parts:
        yield parts


def _flat(buffer: memoryview) -> memoryview:
    if buffer.nbytes == 0:
        return memoryview(b"")  # cast refuses shapes with a zero in them
    if buffer.format == "B" and buffer.ndim == 1:
        return buffer
    return buffer.cast("B")


def _raw_digest(text: object, where: str) -> bytes:
    if not (isinstance(text, str) and is_digest(text)):
        raise CorruptCheckpointError(
            where, found=f"block digest {str(text)[:40]!r}", expected="32 hexadecimal digits"
        )
    return bytes.fromhex(text)
