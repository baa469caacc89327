"""Pieces of memory that are consecutive bytes of a file."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence

from resumekit.storage.host_memory import address_of

# Copies below this size block other threads of the interpreter for microseconds only.
COPY_BYTES = 256 << 10


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


def scatter(memory: memoryview, parts: Sequence[memoryview]) -> None:
    """Copies memory to parts of the same size; large ones without the interpreter's lock."""
    begin = 0
    for part in parts:
        end = begin + part.nbytes
        if part.nbytes < COPY_BYTES:
            part[:] = memory[begin:end]
        else:  # it may be touched for the first time, which takes longer than the copy
            ctypes.memmove(address_of(part), address_of(memory[begin:end]), part.nbytes)
        begin = end


def _flat(buffer: memoryview) -> memoryview:
    if buffer.nbytes == 0:
        return memoryview(b"")  # cast refuses shapes with a zero in them
    if buffer.format == "B" and buffer.ndim == 1:
        return buffer
    return buffer.cast("B")
