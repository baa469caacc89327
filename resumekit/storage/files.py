"""Files of a checkpoint: digested while they are written. Nothing is read back.

The digest of a file is the xxh3-128 of the xxh3-128 digests of its blocks. Blocks are verified one
by one as they are read, in any order and by several threads, and one short line in the manifest
covers every byte. It detects damage and mix-ups, not an attacker.

Source: the XXH3 128-bit hash of https://github.com/Cyan4973/xxHash in its canonical (big-endian)
form, seed 0.

Reading: ``file_reader.py``.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, islice, repeat
from pathlib import Path
from typing import NamedTuple

import xxhash

from resumekit.errors import SaveError
from resumekit.storage.io import pipeline
from resumekit.storage.io.direct import address_of
from resumekit.storage.io.file_system import FileSystem, save_errors
from resumekit.storage.io.pipeline import Calls, UnsyncedFiles
from resumekit.storage.io.shared_memory import SharedMemoryFileSystem

BLOCK_BYTES = 4 << 20
ALGORITHM = "xxh3-128/4MiB"

_DIGEST = re.compile(r"[0-9a-f]{32}")


def is_digest(text: str) -> bool:
    """Whether this is a digest: 32 lower-case hexadecimal digits."""
    return _DIGEST.fullmatch(text) is not None


def combine(blocks: Iterable[bytes]) -> str:
    """The file digest of these raw block digests, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(b"".join(blocks))


def digest_of_block(parts: Iterable[memoryview]) -> bytes:
    """The raw digest of one block, whose bytes are those of these parts."""
    digester = xxhash.xxh3_128()
    for part in parts:
        digester.update(part)
    return digester.digest()


class BlockDigester:
    """The digest of a file whose bytes arrive piece by piece."""

    def __init__(self) -> None:
        self._full: list[bytes] = []
        self._open = xxhash.xxh3_128()
        self._open_bytes = 0

    def update(self, buffer: memoryview) -> None:
        """Takes the next bytes (flat, unsigned bytes)."""
        offset = 0
        while offset < buffer.nbytes:
            piece = buffer[offset : offset + BLOCK_BYTES - self._open_bytes]
            offset += piece.nbytes
            self._open.update(piece)
            self._open_bytes += piece.nbytes
            if self._open_bytes == BLOCK_BYTES:
                self._full.append(self._open.digest())
                self._open.reset()
                self._open_bytes = 0

    @property
    def blocks(self) -> list[bytes]:
        """The raw digest of every block so far; the last one may be short."""
        return [*self._full, self._open.digest()] if self._open_bytes else list(self._full)

    def hexdigest(self) -> str:
        """The file digest of all bytes so far, as 32 hexadecimal digits."""
        return combine(self.blocks)


# ---------------------------------------------------------------- pieces of memory

# Copies below this size block other threads of the interpreter for microseconds only.
COPY_BYTES = 256 << 10


class Piece(NamedTuple):
    """Consecutive bytes of a file that are read.

    Args:
        offset: in the file.
        num_bytes: how many.
        memory: flat and writable, receives them; None where they are verified only.
    """

    offset: int
    num_bytes: int
    memory: memoryview | None


def by_block(pieces: Iterable[Piece], block_bytes: int) -> Iterator[tuple[int, list[Piece]]]:
    """The same bytes as pieces within one block each, with the number of the block.

    Args:
        pieces: in the order of the file; none overlaps another.
        block_bytes: blocks begin at its multiples.
    """
    current, found = -1, list[Piece]()
    for offset, num_bytes, memory in pieces:
        done = 0
        while done < num_bytes:
            index, start = divmod(offset + done, block_bytes)
            length = min(num_bytes - done, block_bytes - start)
            part = None if memory is None else memory[done : done + length]
            if index != current:
                if found:
                    yield current, found
                current, found = index, []
            found.append(Piece(offset + done, length, part))
            done += length
    if found:
        yield current, found


def joined(pieces: Sequence[Piece]) -> memoryview | None:
    """The memory of consecutive pieces, if it is consecutive too; valid as long as theirs is."""
    first = pieces[0].memory
    if first is None or len(pieces) == 1:
        return first
    begin = address_of(first)
    end = begin + first.nbytes
    for piece in pieces[1:]:
        if piece.memory is None or address_of(piece.memory) != end:
            return None
        end += piece.num_bytes
    return memoryview((ctypes.c_ubyte * (end - begin)).from_address(begin)).cast("B")


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


def scatter(block: memoryview, begin: int, pieces: Iterable[Piece]) -> None:
    """Copies the bytes of a block to the pieces; large ones without the interpreter's lock.

    Args:
        block: consecutive bytes of the file.
        begin: where they begin in the file.
        pieces: of it.
    """
    for offset, num_bytes, memory in pieces:
        if memory is None:
            continue
        source = block[offset - begin : offset - begin + num_bytes]
        if num_bytes < COPY_BYTES:
            memory[:] = source
        else:  # it may be touched for the first time, which takes longer than the copy
            ctypes.memmove(address_of(memory), address_of(source), num_bytes)


def _flat(buffer: memoryview) -> memoryview:
    if buffer.nbytes == 0:
        return memoryview(b"")  # cast refuses shapes with a zero in them
    if buffer.format == "B" and buffer.ndim == 1:
        return buffer
    return buffer.cast("B")


# ---------------------------------------------------------------- files that are written

WRITEBACK_BYTES = 8 << 20
FIRST_BYTES = 1 << 20  # the disk begins once so much of a file is copied


@dataclass(frozen=True)
class FileEntry:
    """One line of the inventory.

    Args:
        path: relative to the step directory, parts joined by ``/``.
        size: in bytes.
        digest: 32 hexadecimal digits, as the module says.
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
        unsynced: syncs the file later; by default ``finish`` syncs it.

    Raises:
        SaveError: it could not be created.
    """

    def __init__(
        self,
        file_system: FileSystem,
        path: Path,
        *,
        relative: str,
        writer: int,
        unsynced: UnsyncedFiles | None = None,
    ) -> None:
        self._file_system = file_system
        self._path = path
        self._relative = relative
        self._writer = writer
        self._digester = BlockDigester()
        self._size = 0  # with bytes that are still being written
        self._written = 0
        self._hinted = 0
        self._unsynced = unsynced
        self._in_flight = ExitStack()  # the calls that write, and the memory that they write from
        self._calls: Calls | None = None
        with save_errors(path):
            self._handle: int | None = file_system.create(path)

    def write(self, buffers: Iterable[memoryview]) -> None:
        """Appends the bytes of C-contiguous buffers; they may be reused once this returns.

        They are taken as they are needed, so copies among them need the memory of one chunk. The
        last of them may still be written afterwards, and an error of that is raised by ``finish``.

        Raises:
            SaveError: names the file and the cause.
        """
        with self._open_handle() as handle:
            self._wait()
            is_in_memory = isinstance(self._file_system, SharedMemoryFileSystem)
            unit = min(FIRST_BYTES if is_in_memory else COPY_BYTES, pipeline.CHUNK_BYTES)
            units = cut(buffers, self._size, unit)
            while first := list(islice(units, _first_bytes() // unit)):
                num_bytes = sum(part.nbytes for parts in first for part in parts)
                if num_bytes == _first_bytes() and not is_in_memory:
                    self._write_copies(handle, chain(first, units), unit)
                else:  # a small file, or bytes up to the start of a unit
                    parts = list(chain.from_iterable(first))
                    self._digest(parts)
                    self._append(handle, parts)

    def write_image(self, image: memoryview) -> None:
        """Appends memory without a copy of it; it must not change before ``finish`` returns.

        Args:
            image: flat and writable, such as the view of a ``HostBuffer``; direct I/O needs memory
                that begins at a multiple of 4096.

        Raises:
            SaveError: names the file and the cause.
        """
        with self._open_handle() as handle:
            self._wait()
            calls = self._begin()
            for (chunk,) in cut([image], self._size, pipeline.CHUNK_BYTES):
                calls.wait(num_pending=1)
                calls.submit(partial(self._append, handle, [chunk]))
                self._digest([chunk])

    def _write_copies(self, handle: int, units: Iterator[list[memoryview]], unit: int) -> None:
        """Copies chunks into aligned memory and digests them; each is written meanwhile."""
        ring = self._in_flight.enter_context(pipeline.ring.lent())
        calls = self._begin()
        for num_bytes, memory in zip(_chunk_sizes(), cycle(ring), strict=False):
            calls.wait(num_pending=len(ring) - 1)
            chunk = self._gather(islice(units, num_bytes // unit), memory)
            if not chunk.nbytes:
                break
            calls.submit(partial(self._append, handle, [chunk]))

    def _begin(self) -> Calls:
        self._calls = self._in_flight.enter_context(Calls())
        return self._calls

    def _wait(self) -> None:
        """Waits until all bytes so far are written."""
        if self._calls is not None:
            self._calls.wait()
        self._end()

    def _end(self) -> None:
        self._calls = None
        self._in_flight.close()

    def _gather(self, units: Iterable[list[memoryview]], memory: memoryview) -> memoryview:
        """The front of this memory, with digested copies of the units."""
        copied = digested = 0
        for parts in units:
            for part in parts:
                memory[copied : copied + part.nbytes] = part
                copied += part.nbytes
            self._digest([memory[digested:copied]])
            digested = copied
        return memory[:copied]

    def _digest(self, parts: list[memoryview]) -> None:
        for part in parts:
            self._digester.update(part)
            self._size += part.nbytes

    def _append(self, handle: int, parts: list[memoryview]) -> None:
        self._file_system.write(handle, parts)
        self._written += sum(part.nbytes for part in parts)
        if self._written - self._hinted >= WRITEBACK_BYTES:
            self._hint(handle)

    def _hint(self, handle: int) -> None:
        num_bytes, self._hinted = self._written - self._hinted, self._written
        if num_bytes:
            self._file_system.writeback(handle, self._written - num_bytes, num_bytes)

    def finish(self) -> FileEntry:
        """The file's line in the inventory, once its bytes are written.

        They survive a power cut once this returns, or once ``unsynced`` has synced them.

        Raises:
            SaveError: names the file and the cause.
        """
        with self._open_handle() as handle:
            self._wait()
            if self._unsynced is None:
                self._handle = None
                with UnsyncedFiles(self._file_system) as alone:
                    alone.add(handle, self._path)
            else:
                self._hint(handle)  # then one commit of a journal serves all that wait for theirs
                self._handle = None
                self._unsynced.add(handle, self._path)
        return FileEntry(self._relative, self._size, self._digester.hexdigest(), self._writer)

    def discard(self) -> None:
        """Closes an unfinished file. It stays in staging, which is never read."""
        handle, self._handle = self._handle, None
        try:
            self._end()
        finally:
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


def _first_bytes() -> int:
    return min(FIRST_BYTES, pipeline.CHUNK_BYTES)


def _chunk_sizes() -> Iterator[int]:
    """A small chunk, then others, each as long as all before it, up to the size of most."""
    size = _first_bytes()
    yield size
    while size < pipeline.CHUNK_BYTES:
        yield size
        size *= 2
    yield from repeat(pipeline.CHUNK_BYTES)
