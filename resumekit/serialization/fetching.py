"""Reads wanted boxes of tensors out of data files: which bytes, in which order, to which memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from resumekit.serialization.index import Logical
from resumekit.serialization.layouts import Chunk, Layout
from resumekit.serialization.leaves import dense_strides, flat_bytes
from resumekit.serialization.sharding import Box
from resumekit.storage import FileReader, Piece


@dataclass(frozen=True)
class Fetch:
    """A box to be copied out of one stored part.

    Args:
        name: of the tensor.
        chunk: the stored part.
        stored: where the box lies in that part.
        wanted: where it lies in the part wanted.
    """

    name: str
    chunk: Chunk
    stored: Box
    wanted: Box


def plan_fetches(tensors: Mapping[str, Logical], wanted: Mapping[str, Box]) -> list[Fetch]:
    """What is to be read so that the wanted parts are there.

    Args:
        tensors: where the parts of each tensor are.
        wanted: the part wanted of each, by name.
    """
    # Most tensors are sharded like another, and in the index those share one list of chunks.
    overlaps: dict[tuple[int, Box], list[_Overlap]] = {}
    fetches = []
    for name, box in wanted.items():
        chunks = tensors[name].chunks
        if (id(chunks), box) not in overlaps:
            overlaps[id(chunks), box] = list(find_overlaps(chunks, box))
        fetches += [Fetch(name, *overlap) for overlap in overlaps[id(chunks), box]]
    return fetches


_Overlap = tuple[Chunk, Box, Box]


def find_overlaps(chunks: Layout, wanted: Box) -> Iterator[_Overlap]:
    """The chunks that hold a part of a box, where that part lies in them, and where in the box."""
    if len(chunks) == 1:  # the usual case, without the search
        (chunk,) = chunks
        if chunk.box == wanted and wanted.num_elements:
            yield chunk, wanted.relative_to(wanted), wanted.relative_to(wanted)
            return
    for chunk in chunks.near(wanted):
        common = chunk.box.intersection(wanted)
        if common.num_elements:
            yield chunk, common.relative_to(chunk.box), common.relative_to(wanted)


_MAX_RANGE_BYTES = 16 << 20


@dataclass(frozen=True)
class ByteRange:
    """Consecutive bytes of a data file, and the memory for the wanted elements among them.

    Args:
        offset: in the file.
        num_bytes: from the first wanted element to the last.
        target: memory of the wanted elements' shape, contiguous or not; on the meta device where
            they are verified only.
        strides: of the wanted elements in the file, in elements.
    """

    offset: int
    num_bytes: int
    target: torch.Tensor
    strides: tuple[int, ...]

    @property
    def is_direct(self) -> bool:
        """Whether the bytes can be read into the target without a copy."""
        return self.num_bytes == self.target.nbytes and self.target.is_contiguous()

    def memory(self) -> torch.Tensor | None:
        """Memory for the bytes: the target where they need no copy; None where they need none."""
        if self.target.is_meta:
            return None
        if self.is_direct:
            return self.target
        return torch.empty(self.num_bytes, dtype=torch.uint8, device="cpu")

    def copy_from(self, memory: torch.Tensor) -> None:
        """Copies the wanted elements of the bytes that were read into the target."""
        found = memory.view(self.target.dtype)
        self.target.copy_(found.as_strided(self.target.shape, self.strides))


def byte_ranges(
    stored: Box, sizes: Sequence[int], begin: int, target: torch.Tensor
) -> Iterator[ByteRange]:
    """The byte ranges that hold a box of a row-major tensor, of about 16 MiB at most.

    One that needs no copy may have any length.

    Args:
        stored: the box, in the tensor that is stored.
        sizes: the shape of that tensor.
        begin: where its bytes begin in the file.
        target: memory of the box's shape.
    """
    strides = dense_strides(tuple(sizes))
    first = sum(o * s for o, s in zip(stored.offsets, strides, strict=True))
    extent = 1 + sum((n - 1) * s for n, s in zip(stored.sizes, strides, strict=True))
    width = target.element_size()
    found = ByteRange(begin + first * width, extent * width, target, strides)
    if found.is_direct or found.num_bytes <= _MAX_RANGE_BYTES or target.numel() == 1:
        yield found
        return
    dimension = next(d for d, size in enumerate(stored.sizes) if size > 1)
    half = stored.sizes[dimension] // 2
    for start, length in ((0, half), (half, stored.sizes[dimension] - half)):
        offsets, lengths = list(stored.offsets), list(stored.sizes)
        offsets[dimension] += start
        lengths[dimension] = length
        part = Box(tuple(offsets), tuple(lengths))
        yield from byte_ranges(part, sizes, begin, target.narrow(dimension, start, length))


def read_ranges(
    reader: FileReader, wanted: Iterable[ByteRange], block_digests: Sequence[str]
) -> None:
    """Reads byte ranges of one file, each block once, and fills their targets.

    Args:
        reader: of the file.
        wanted: in any order; none overlaps another.
        block_digests: of all blocks of the file.

    Raises:
        CheckpointError: from the reader.
    """
    for batch in _batches(sorted(wanted, key=lambda each: each.offset)):
        memories = [each.memory() for each in batch]
        pieces = [
            Piece(each.offset, each.num_bytes, None if memory is None else flat_bytes(memory))
            for each, memory in zip(batch, memories, strict=True)
        ]
        reader.read_pieces(pieces, block_digests)
        for each, memory in zip(batch, memories, strict=True):
            if memory is not None and memory is not each.target:
                each.copy_from(memory)


def _batches(ordered: Sequence[ByteRange]) -> Iterator[list[ByteRange]]:
    """Groups of ranges whose copies fit into a little memory together."""
    batch: list[ByteRange] = []
    num_bytes = 0
    for each in ordered:
        needed = 0 if each.is_direct else each.num_bytes
        if needed and num_bytes + needed > 2 * _MAX_RANGE_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(each)
        num_bytes += needed
    if batch:
        yield batch
