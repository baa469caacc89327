"""Files of a checkpoint: verified while they are read.

A reader returns no byte before its block's digest was compared, and reads no byte twice when it is
used from front to back.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import xxhash

from resumekit.errors import CorruptCheckpointError
from resumekit.storage.files import (
    BLOCK_BYTES,
    FileEntry,
    Piece,
    by_block,
    combine,
    is_digest,
    joined,
    scatter,
)
from resumekit.storage.io.direct import is_aligned
from resumekit.storage.io.file_system import FileSystem, read_errors, read_fully, save_errors
from resumekit.storage.io.pipeline import Slots

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

    def read_pieces(self, pieces: Sequence[Piece], block_digests: Sequence[str]) -> None:
        """Reads pieces of the file, all verified.

        Blocks are read by several threads: one to memory that direct I/O can use and that receives
        all of it straight there, any other one through the process's ring. A block at either end
        that is wanted in part is kept for the next call. Pieces without memory cost no memory.

        Args:
            pieces: in the order of the file; none overlaps another.
            block_digests: of all blocks of the file; verified against the manifest.

        Raises:
            CorruptCheckpointError: names the file and both digests, or both sizes.
            UnreadableCheckpointError: the bytes could not be read.
        """
        self._check_blocks(block_digests)
        for offset, num_bytes, _ in pieces:
            if offset < 0 or offset + num_bytes > self.entry.size:
                raise CorruptCheckpointError(
                    self._where,
                    found=f"bytes {offset} to {offset + num_bytes} are wanted",
                    expected=f"a range within its {self.entry.size} bytes",
                )
        blocks = list(by_block(pieces, BLOCK_BYTES))
        ends = {0, len(blocks) - 1}
        between = []
        for number, (index, parts) in enumerate(blocks):
            if number in ends and not self._is_whole(index, parts):
                self._copy_from_block(index, parts)
            else:
                between.append((index, parts))
        self._read_blocks(between)

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

    def _is_whole(self, index: int, parts: Sequence[Piece]) -> bool:
        """Whether the parts are all bytes of a block."""
        return sum(part.num_bytes for part in parts) == self._block_size(index)

    def _copy_from_block(self, index: int, parts: Sequence[Piece]) -> None:
        self._keep_block(index)
        scatter(memoryview(self._block), index * BLOCK_BYTES, parts)

    def _keep_block(self, index: int) -> None:
        if index == self._block_index:
            return
        self._block_index = -1
        self._block = self._block or bytearray(min(BLOCK_BYTES, self.entry.size))
        self._read_known_block(memoryview(self._block)[: self._block_size(index)], index)
        self._block_index = index

    def _read_all(self, blocks: Iterable[memoryview]) -> None:
        """Reads the whole file into these blocks, one after the other, and verifies it."""
        digests = [self._read_block(block, index) for index, block in enumerate(blocks)]
        self._compare(combine(digests), self.entry.digest)

    def _read_blocks(self, blocks: Sequence[tuple[int, list[Piece]]]) -> None:
        if len(blocks) >= _MANY_BLOCKS:
            with Slots(BLOCK_BYTES) as slots:
                for _ in slots.map(self._read_through, blocks):
                    pass
            return
        for index, parts in blocks:
            whole = joined(parts) if self._is_whole(index, parts) else None
            if whole is not None:
                self._read_known_block(whole, index)
            else:
                self._copy_from_block(index, parts)

    def _read_through(self, block: tuple[int, list[Piece]], slot: memoryview) -> None:
        """Reads one block straight to where it belongs, if direct I/O can, or else by a slot."""
        index, parts = block
        whole = joined(parts) if self._is_whole(index, parts) else None
        if whole is not None and is_aligned(whole):
            self._read_known_block(whole, index)
            return
        memory = slot[: self._block_size(index)]
        self._read_known_block(memory, index)
        scatter(memory, index * BLOCK_BYTES, parts)

    def _digest_block(self, index: int, slot: memoryview) -> bytes:
        return self._read_block(slot[: self._block_size(index)], index)

    def _read_known_block(self, memory: memoryview, index: int) -> None:
        found, expected = self._read_block(memory, index), self._expected[index]
        self._compare(found.hex(), expected.hex(), of=f"the digest of its block {index}")

    def _read_block(self, memory: memoryview, index: int) -> bytes:
        """Fills memory with a whole block; returns its digest."""
        self._fill(memory, index * BLOCK_BYTES)
        return xxhash.xxh3_128_digest(memory)

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


# ---------------------------------------------------------------- files of another checkpoint

# Another file system, one without links or that refuses this one, and too many links.
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})


def link_file(file_system: FileSystem, source: Path, target: Path) -> bool:
    """Whether the target is now another name of the source; False where it has to be copied.

    Raises:
        SaveError: the link failed for a reason that a copy would meet as well.
    """
    with save_errors(target):
        try:
            file_system.link(source, target)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            return False
    return True


def read_blocks(file_system: FileSystem, source: Path, num_bytes: int) -> Iterator[memoryview]:
    """The bytes of a file in blocks of 4 MiB, each valid until the next one; not verified.

    Args:
        file_system: the file system.
        source: the file.
        num_bytes: its size; a shorter file gives fewer.

    Raises:
        UnreadableCheckpointError: it could not be read.
    """
    with read_errors(str(source)):
        handle = file_system.open(source)
    try:
        block = memoryview(bytearray(min(BLOCK_BYTES, num_bytes)))
        for begin in range(0, num_bytes, BLOCK_BYTES):
            wanted = block[: num_bytes - begin]
            with read_errors(str(source)):
                num_read = read_fully(file_system, handle, begin, wanted)
            yield wanted[:num_read]
    finally:
        with suppress(OSError):  # nothing was written
            file_system.close(handle)
