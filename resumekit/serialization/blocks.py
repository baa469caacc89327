"""The two ends through which the data file goes, and how leaves and tensors are streamed through.

Storage's ``FileWriter`` and ``FileReader`` are a ``BlockWriter`` and a ``BlockReader``; a pair that
goes around the page cache can take their place without a change elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from resumekit.storage import BLOCK_BYTES, FileEntry

_BATCH_BYTES = 16 << 20
_NUM_READERS = 2
_MIN_BYTES_PER_READER = 8 * BLOCK_BYTES


class BlockWriter(Protocol):
    """A new file that is written once, from front to back, and digested on the way."""

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Appends all bytes; the buffers are free for reuse once this returns."""
        ...

    def finish(self) -> FileEntry:
        """The file's line in the inventory, once its bytes survive a power cut."""
        ...

    @property
    def block_digests(self) -> tuple[str, ...]:
        """The digest of each block so far."""
        ...


class BlockReader(Protocol):
    """A file that gives out verified bytes only.

    Args:
        entry: its line in the inventory.
    """

    entry: FileEntry

    def read_into(
        self, buffers: Sequence[memoryview], offset: int, block_digests: Sequence[str]
    ) -> None:
        """Fills the buffers with consecutive bytes of the file, all verified."""
        ...

    def close(self) -> None:
        """Gives the file back."""
        ...


def write_pieces(writer: BlockWriter, pieces: Iterable[memoryview]) -> None:
    """Appends the pieces, many at a time: a checkpoint holds thousands of small ones.

    Args:
        writer: the file.
        pieces: read as they are needed, so copies among them need no more than 16 MiB at a time.
    """
    batch: list[memoryview] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += piece.nbytes
        if num_bytes >= _BATCH_BYTES:
            writer.write(batch)
            batch, num_bytes = [], 0
    if batch:
        writer.write(batch)


def read_pieces(
    open_reader: Callable[[], BlockReader],
    buffers: Sequence[memoryview],
    offset: int,
    block_digests: Sequence[str],
) -> None:
    """Fills the buffers with consecutive bytes of a file, many of them by two threads.

    Most of the time goes into pages that are touched for the first time, and one core alone does
    that more slowly than a disk delivers: 1.49 GB took 0.8 s by two threads, 2.0 s by one.

    Args:
        open_reader: opens the file; each thread has a reader of its own.
        buffers: flat, writable memory.
        offset: where in the file the first one begins.
        block_digests: of all blocks of the file.

    Raises:
        CheckpointError: whatever the reader says of the file.
    """

    def fill(part: tuple[list[memoryview], int]) -> None:
        reader = open_reader()
        try:
            reader.read_into(*part, block_digests)
        finally:
            reader.close()

    parts = list(_parts(buffers, offset))
    if len(parts) == 1:
        fill(parts[0])
        return
    with ThreadPoolExecutor(len(parts), thread_name_prefix="resumekit-read") as pool:
        for _ in pool.map(fill, parts):
            pass


def _parts(buffers: Sequence[memoryview], offset: int) -> Iterator[tuple[list[memoryview], int]]:
    """The buffers in a few parts of like size that meet where two blocks meet."""
    num_bytes = sum(buffer.nbytes for buffer in buffers)
    num_parts = max(1, min(_NUM_READERS, num_bytes // _MIN_BYTES_PER_READER))
    share = num_bytes // num_parts
    rest = list(buffers)
    for _ in range(num_parts - 1):
        end = (offset + share) // BLOCK_BYTES * BLOCK_BYTES
        head, rest = _split(rest, end - offset)
        yield head, offset
        offset = end
    yield rest, offset


def _split(buffers: list[memoryview], num_bytes: int) -> tuple[list[memoryview], list[memoryview]]:
    for index, buffer in enumerate(buffers):
        if buffer.nbytes > num_bytes:
            head, tail = buffer[:num_bytes], buffer[num_bytes:]
            return [*buffers[:index], head], [tail, *buffers[index + 1 :]]
        num_bytes -= buffer.nbytes
    return buffers, []
