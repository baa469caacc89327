"""Pieces of memory that are consecutive bytes of a file."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from resumekit.storage.io.host_memory import address_of

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
