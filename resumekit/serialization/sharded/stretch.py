"""From boxes of stored parts to stretches of a data file, and from there into tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from resumekit.serialization.blocks import BlockReader, read_pieces
from resumekit.serialization.leaves import dense_strides, flat_bytes
from resumekit.serialization.sharding import Box

_MAX_STRETCH_BYTES = 16 << 20
_MANY_BYTES = 32 << 20  # from here on two threads are worth opening the file for


@dataclass(frozen=True)
class Stretch:
    """Consecutive bytes of a data file, and where the elements among them belong.

    Args:
        offset: in the file.
        num_bytes: from the first wanted element to the last.
        target: memory of the wanted elements' shape, contiguous or not.
        strides: of the wanted elements in the file, in elements.
    """

    offset: int
    num_bytes: int
    target: torch.Tensor
    strides: tuple[int, ...]

    @property
    def is_direct(self) -> bool:
        """Whether the bytes can be read to where they belong, without a copy."""
        return self.num_bytes == self._target_bytes and self.target.is_contiguous()

    @property
    def _target_bytes(self) -> int:
        return self.target.numel() * self.target.element_size()

    def copy_from(self, memory: torch.Tensor) -> None:
        """Moves the wanted elements of the stretch, as it was read, to where they belong."""
        stretch = memory.view(self.target.dtype)
        self.target.copy_(stretch.as_strided(self.target.shape, self.strides))


def stretches(
    stored: Box, sizes: Sequence[int], begin: int, target: torch.Tensor
) -> Iterator[Stretch]:
    """The stretches that hold a box of a row-major tensor, none of them much longer than 16 MiB.

    One that needs no copy may be of any length.

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
    stretch = Stretch(begin + first * width, extent * width, target, strides)
    if stretch.is_direct or stretch.num_bytes <= _MAX_STRETCH_BYTES or target.numel() == 1:
        yield stretch
        return
    dimension = next(d for d, size in enumerate(stored.sizes) if size > 1)
    half = stored.sizes[dimension] // 2
    for start, length in ((0, half), (half, stored.sizes[dimension] - half)):
        offsets, lengths = list(stored.offsets), list(stored.sizes)
        offsets[dimension] += start
        lengths[dimension] = length
        part = Box(tuple(offsets), tuple(lengths))
        yield from stretches(part, sizes, begin, target.narrow(dimension, start, length))


def read_stretches(
    open_reader: Callable[[], BlockReader],
    wanted: Iterable[Stretch],
    block_digests: Sequence[str],
) -> None:
    """Reads stretches of one file, each block of it once, and fills their targets.

    Args:
        open_reader: opens the file.
        wanted: in any order; none overlaps another.
        block_digests: of all blocks of the file.

    Raises:
        CheckpointError: whatever the reader says of the file.
    """
    reader = open_reader()
    try:
        for run in _runs(sorted(wanted, key=lambda stretch: stretch.offset)):
            memories = [
                flat_memory(each.target) if each.is_direct else _memory(each.num_bytes)
                for each in run
            ]
            buffers = [flat_bytes(memory) for memory in memories]
            if sum(buffer.nbytes for buffer in buffers) >= _MANY_BYTES:
                read_pieces(open_reader, buffers, run[0].offset, block_digests)
            else:
                reader.read_into(buffers, run[0].offset, block_digests)
            for each, memory in zip(run, memories, strict=True):
                if not each.is_direct:
                    each.copy_from(memory)
    finally:
        reader.close()


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, as a tensor over the same memory."""
    return tensor.reshape(-1).view(torch.uint8)


def _memory(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _runs(ordered: Sequence[Stretch]) -> Iterator[list[Stretch]]:
    """Stretches that follow one another in the file and need no copy, together; others alone."""
    run: list[Stretch] = []
    for each in ordered:
        joins = run and run[-1].offset + run[-1].num_bytes == each.offset
        if run and not (joins and each.is_direct and run[-1].is_direct):
            yield run
            run = []
        run.append(each)
    if run:
        yield run
