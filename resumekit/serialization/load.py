"""From the data file into tensors: verified bytes, read straight into the memory they stay in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch

from resumekit.errors import CorruptCheckpointError
from resumekit.serialization.blocks import BlockReader, read_pieces
from resumekit.serialization.index import Index
from resumekit.serialization.layout import Record, header
from resumekit.serialization.leaves import PLAIN_TYPES, dense_strides, flat_bytes, retyped


def read_tensors(
    open_reader: Callable[[], BlockReader],
    index: Index,
    *,
    where: str,
    names: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """The tensors of a data file, by name; each has memory of its own.

    Args:
        open_reader: opens the data file.
        index: what is in it.
        where: what error messages call it.
        names: the tensors wanted; all by default. Names that are not in the index are passed over.

    Raises:
        CheckpointError: what the reader says of the file, or that it does not fit the index.
    """
    if not index.records:
        return {}
    expected = header(index.records, index.ties)
    _check_size(open_reader, len(expected) + index.records[-1].end, where)
    wanted = [record for record in index.records if names is None or record.name in names]
    found = _memory(len(expected))
    memory = [_memory(record.num_bytes) for record in wanted]
    places = [(0, found)]
    places += [(len(expected) + record.begin, m) for record, m in zip(wanted, memory, strict=True)]
    for offset, buffers in _runs(places):
        read_pieces(open_reader, buffers, offset, index.block_digests)
    if flat_bytes(found) != expected:
        raise CorruptCheckpointError(
            where, found="its header differs from what the index says of its tensors"
        )
    return {record.name: _typed(record, m) for record, m in zip(wanted, memory, strict=True)}


def _check_size(open_reader: Callable[[], BlockReader], expected: int, where: str) -> None:
    reader = open_reader()
    reader.close()
    if reader.entry.size != expected:
        raise CorruptCheckpointError(
            where, found=f"has {reader.entry.size} bytes", expected=f"{expected} as the index says"
        )


def _memory(num_bytes: int) -> torch.Tensor:
    # In pages of whatever size the system likes: huge ones, asked for, made a load three times as
    # slow on a virtual machine that had given its unused memory back to the host.
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _runs(places: list[tuple[int, torch.Tensor]]) -> Iterator[tuple[int, list[memoryview]]]:
    """What stands together in the file, to be read together.

    Args:
        places: offset in the file and memory of each piece, in the order of the file.
    """
    begin = reached = 0
    buffers: list[memoryview] = []
    for offset, memory in places:
        if offset != reached:
            yield begin, buffers
            begin, buffers = offset, []
        buffers.append(flat_bytes(memory))
        reached = offset + memory.numel()
    yield begin, buffers


def _typed(record: Record, memory: torch.Tensor) -> torch.Tensor:
    """The memory as the tensor that it holds."""
    dtype = record.element.torch_dtype
    assert dtype is not None  # the index has been checked
    row_major = dense_strides(record.shape)
    if record.strides is None:
        return retyped(memory, dtype, 0, record.shape, row_major)
    # Stored row by row, needed in another order: moved as numbers of the same size, bit for bit.
    plain = PLAIN_TYPES[record.element.num_bytes]
    ordered = _memory(record.num_bytes)
    retyped(ordered, plain, 0, record.shape, record.strides).copy_(
        retyped(memory, plain, 0, record.shape, row_major)
    )
    return retyped(ordered, dtype, 0, record.shape, record.strides)
