"""Files of a checkpoint: verified while they are read.

A reader returns no byte before its block's digest was compared, and reads no byte twice when it is
used from front to back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import xxhash

from resumekit.errors import CorruptCheckpointError
from resumekit.storage.digest import BLOCK_BYTES, combine, is_digest
from resumekit.storage.direct import is_aligned
from resumekit.storage.files import FileEntry
from resumekit.storage.io import FileSystem, read_errors, read_fully
from resumekit.storage.pieces import cut, scatter
from resumekit.storage.pipeline import Slots

MAX_READ_BYTES = 1 << 30
_MANY_BLOCKS = 16  # from here on, threads pay off


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

        Whole blocks are read through the process's ring, many of them by several threads. A partly
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

    def read_image(
        self, image: memoryview, blocks: Sequence[int], block_digests: Sequence[str]
    ) -> None:
        """Fills memory with whole blocks of the file, all verified, without a copy.

        Args:
            image: flat and writable, such as the view of a ``HostBuffer``; direct I/O needs memory
                that begins at a multiple of 4096. It holds one block after the other.
            blocks: their indices in the file, ascending; only the file's last one may be short.
            block_digests: of all blocks of the file; verified against the manifest.

        Raises:
            CorruptCheckpointError: names the file and both digests, or both sizes.
            UnreadableCheckpointError: the bytes could not be read.
        """
        self._check_blocks(block_digests)
        outside = [index for index in blocks if not 0 <= index < len(self._expected)]
        if outside:
            raise CorruptCheckpointError(
                self._where,
                found=f"block {outside[0]} is wanted",
                expected=f"one of its {len(self._expected)} blocks",
            )
        whole = []
        begin = 0
        for index in blocks:
            end = begin + self._block_size(index)
            whole.append(([image[begin:end]], index))
            begin = end
        self._read_blocks(whole)

    def verify(self) -> None:
        """Reads every byte and compares the digest.

        Raises:
            CorruptCheckpointError: names the file and both digests.
            UnreadableCheckpointError: the bytes could not be read.
        """
        if len(self._block_offsets) < _MANY_BLOCKS:
            block = memoryview(bytearray(min(BLOCK_BYTES, self.entry.size)))
            self._read_all(block[: self.entry.size - begin] for begin in self._block_offsets)
            return
        with Slots(BLOCK_BYTES) as slots:
            digests = list(slots.map(self._digest_block, range(len(self._block_offsets))))
        self._compare(combine(digests), self.entry.digest)

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
        if len(blocks) < _MANY_BLOCKS:
            for parts, index in blocks:
                self._read_known_block(parts, index)
            return
        with Slots(BLOCK_BYTES) as slots:
            for _ in slots.map(self._read_through, blocks):
                pass

    def _read_through(self, block: tuple[list[memoryview], int], slot: memoryview) -> None:
        """Reads one block straight to where it belongs, if direct I/O can, or else by a slot."""
        parts, index = block
        if len(parts) == 1 and is_aligned(parts[0]):
            self._read_known_block(parts, index)
            return
        memory = slot[: self._block_size(index)]
        self._read_known_block([memory], index)
        scatter(memory, parts)

    def _digest_block(self, index: int, slot: memoryview) -> bytes:
        return self._read_block([slot[: self._block_size(index)]], index)

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


def _raw_digest(text: object, where: str) -> bytes:
    if not (isinstance(text, str) and is_digest(text)):
        raise CorruptCheckpointError(
            where, found=f"block digest {str(text)[:40]!r}", expected="32 hexadecimal digits"
        )
    return bytes.fromhex(text)
