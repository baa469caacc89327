"""Tensors of which every rank holds a part: what part that is, and how such a tensor is made.

torch's DTensor is asked for only where a program has loaded it: importing it takes a second.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resumekit.errors import UnsupportedValueError

WHOLE = "whole"  # the copy group of plain tensors


@dataclass(frozen=True)
class Box:
    """A part of a tensor that goes from one corner to another.

    Args:
        offsets: where it begins in each dimension of the whole tensor, in elements.
        sizes: how far it goes in each dimension, in elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """The elements in it."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its elements as an index of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def intersection(self, other: Box) -> Box:
        """The elements in both; without elements where they do not overlap."""
        pairs = list(zip(self.slices, other.slices, strict=True))
        begins = tuple(max(a.start, b.start) for a, b in pairs)
        ends = (min(a.stop, b.stop) for a, b in pairs)
        return Box(begins, tuple(max(e - b, 0) for b, e in zip(begins, ends, strict=True)))

    def relative_to(self, other: Box) -> Box:
        """The same elements, counted from the first corner of another box."""
        offsets = tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True))
        return Box(offsets, self.sizes)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{each.start}:{each.stop}" for each in self.slices) + "]"


@dataclass(frozen=True, eq=False)
class FlatPart:
    """A range of the elements of a tensor in row-major order: what a rank holds under FSDP1.

    Args:
        shape: of the whole tensor.
        begin: the first element of the range.
        local: its elements, in one dimension; the live memory.
        copies: a name common to all ranks that hold the same range; None for a single holder.
    """

    shape: torch.Size
    begin: int
    local: Tensor
    copies: str | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type of the elements."""
        return self.local.dtype

    def like(self, local: Tensor) -> FlatPart:
        """The same range of a tensor of this shape with other elements."""
        return FlatPart(self.shape, self.begin, local, self.copies)

    def boxes(self) -> tuple[Box, ...]:
        """The boxes that it is made of, in the order of its elements."""
        return _boxes_in_range(tuple(self.shape), self.begin, self.begin + self.local.numel())

    def pieces(self) -> Iterator[Tensor]:
        """The elements of each box."""
        begin = 0
        for box in self.boxes():
            yield self.local[begin : begin + box.num_elements].view(box.sizes)
            begin += box.num_elements

    def rows(self) -> Box:
        """The smallest box of whole rows that holds it."""
        shape = tuple(self.shape)
        if not self.local.numel():
            return Box((0,) * len(shape), (0,) * len(shape))
        if not shape:
            return Box.whole(shape)
        row = math.prod(shape[1:])
        first, last = self.begin // row, (self.begin + self.local.numel() - 1) // row
        return Box((first, *(0,) * len(shape[1:])), (last + 1 - first, *shape[1:]))

    def cut(self, memory: Tensor) -> Tensor:
        """A copy of the range out of the box of its rows, or out of the whole tensor."""
        begin = self.begin
        if memory.shape != self.shape and self.local.numel():
            begin -= self.rows().offsets[0] * math.prod(self.shape[1:])
        return memory.reshape(-1)[begin : begin + self.local.numel()].clone()


def _boxes_in_range(shape: tuple[int, ...], begin: int, end: int) -> tuple[Box, ...]:
    """The rest of a row, whole rows, and the beginning of one; each row like the whole."""
    if begin == end:
        return ()
    if not shape:
        return (Box((), ()),)
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        return _in_row(shape, last, begin - last * row, end - last * row)
    parts = _in_row(shape, first - 1, begin - (first - 1) * row, row) if begin % row else ()
    if first < last:
        inner = shape[1:]
        parts += (Box((first, *(0,) * len(inner)), (last - first, *inner)),)
    return parts + _in_row(shape, last, 0, end - last * row)


def _in_row(shape: tuple[int, ...], number: int, begin: int, end: int) -> tuple[Box, ...]:
    return tuple(
        Box((number, *box.offsets), (1, *box.sizes))
        for box in _boxes_in_range(shape[1:], begin, end)
    )


def is_sharded(value: Any) -> bool:
    """Whether this is a part of a tensor: a DTensor, a parameter or not, or a FlatPart."""
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, FlatPart) or (module is not None and isinstance(value, module.DTensor))


def local_part(tensor: Any) -> Any:
    """The memory of this rank: a part's local tensor, and any other value itself."""
    if isinstance(tensor, FlatPart):
        return tensor.local
    # Not to_local(): that is an operation of autograd, and waits for nothing that is
    # unfinished at a safe point. torch 2.13 tensor/_api.py, DTensor.__new__ sets the attribute.
    return tensor._local_tensor if is_sharded(tensor) else tensor


def boxes_of(tensor: Any, where: str) -> tuple[Box, ...]:
    """The parts of a tensor that this rank holds, none of them empty.

    Raises:
        UnsupportedValueError: see ``box_of``.
    """
    if isinstance(tensor, FlatPart):
        return tensor.boxes()
    box = box_of(tensor, where)
    return () if box is None or not box.num_elements else (box,)


def pieces_of(tensor: Any) -> Iterator[Tensor]:
    """The elements of each of those parts, in this rank's memory."""
    if isinstance(tensor, FlatPart):
        yield from tensor.pieces()
    else:
        yield local_part(tensor)


def box_of(tensor: Any, where: str) -> Box | None:
    """The box that holds what this rank holds; None where its mesh leaves this rank out.

    It is no larger than that, but for a FlatPart: that box has whole rows.

    Args:
        tensor: a DTensor or a plain tensor.
        where: what errors call it.

    Raises:
        UnsupportedValueError: it holds sums that are not summed up over the ranks yet, or its local
            tensor is not the box that its placements say.
    """
    if isinstance(tensor, FlatPart):
        return tensor.rows()
    if not is_sharded(tensor):
        return Box.whole(tuple(tensor.shape))
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedValueError(
            where,
            found=f"a tensor with the placements {tensor.placements}: each rank holds a summand",
            expected="placements without Partial",
            remedy="Call redistribute() with Replicate or Shard first",
        )
    if tensor.device_mesh.get_coordinate() is None:
        return None
    (chunk,) = tensor.__create_chunk_list__()
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    local = tuple(local_part(tensor).shape)
    if box.num_elements != math.prod(local) or (box.num_elements and box.sizes != local):
        raise UnsupportedValueError(
            where,
            found=f"a local tensor of shape {local}",
            expected=f"{box.sizes}, as its placements {tensor.placements} say",
        )
    return box


def copy_group(tensor: Any, num_ranks: int) -> str | None:
    """What the ranks that hold the same part of a tensor have in common; None for the only holder.

    Args:
        tensor: a DTensor or a plain tensor, which every rank holds whole.
        num_ranks: of the job.
    """
    if isinstance(tensor, FlatPart):
        return tensor.copies
    if not is_sharded(tensor):
        return WHOLE
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    shape = tuple(mesh.shape)
    split = [d for d, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    num_holders = num_ranks // math.prod(shape[d] for d in split)
    if num_holders == 1:
        return None
    return f"{tensor.placements} on {shape} at {[coordinate[d] for d in split]}"


def sharded_like(partner: Any, local: Tensor) -> Any:
    """A part of the partner's kind (shape, mesh and placements) around this rank's memory.

    The part stays where it is: one in host memory may stand for a tensor of another device until it
    is copied there.

    Args:
        partner: a DTensor or a FlatPart.
        local: this rank's part of the new tensor, of any dtype; the box that holds it.
    """
    if isinstance(partner, FlatPart):
        return partner.like(partner.cut(local))
    # torch 2.13 distributed/fsdp/_fully_shard/_fsdp_common.py, _from_local_no_grad, makes DTensors
    # in this way; DTensor.from_local would move the part to the mesh's device.
    spec = partner._spec
    meta = spec.tensor_meta._replace(dtype=local.dtype)
    kind = sys.modules["torch.distributed.tensor"].DTensor
    return kind(local, dataclasses.replace(spec, tensor_meta=meta), requires_grad=False)


def sharded_dims(tensor: Any, where: str) -> list[int | None]:
    """The dimension of a DTensor that each dimension of its mesh shards; None where it replicates.

    Raises:
        UnsupportedValueError: a placement is neither Shard nor Replicate.
    """
    placing = sys.modules["torch.distributed.tensor"]
    if any(type(each) not in (placing.Shard, placing.Replicate) for each in tensor.placements):
        raise UnsupportedValueError(
            where,
            found=f"a tensor with the placements {tensor.placements}",
            expected="Shard or Replicate in each dimension of the mesh",
        )
    return [getattr(placement, "dim", None) for placement in tensor.placements]


def sharded_over(tensor: Any, shape: Sequence[int], dims: Sequence[int | None]) -> Any:
    """A DTensor without memory, on the mesh of another one.

    Args:
        tensor: the other one.
        shape: of the new one.
        dims: see ``sharded_dims``; on a mesh of other dimensions it is replicated.
    """
    placing, mesh = sys.modules["torch.distributed.tensor"], tensor.device_mesh
    known = dims if len(dims) == mesh.ndim else [None] * mesh.ndim
    placements = [placing.Replicate() if dim is None else placing.Shard(dim) for dim in known]
    whole = torch.empty(tuple(shape), device="meta")
    local = whole
    for number, dim in enumerate(known):
        if dim is not None and mesh.get_coordinate() is not None:
            parts = torch.chunk(local, mesh.size(number), dim)
            rank = mesh.get_local_rank(number)
            local = parts[rank] if rank < len(parts) else local.narrow(dim, 0, 0)
    spec = dataclasses.replace(
        tensor._spec,
        placements=tuple(placements),
        tensor_meta=tensor._spec.tensor_meta._replace(shape=whole.shape, stride=whole.stride()),
    )
    return placing.DTensor(local, spec, requires_grad=False)


def part_like(partner: Any, saved: Any) -> Any:
    """A whole tensor cut to the part that the partner has here; anything else as it is.

    Args:
        partner: the live value.
        saved: what is to be copied into it.
    """
    if not is_sharded(partner) or is_sharded(saved) or not isinstance(saved, Tensor):
        return saved
    if saved.shape != partner.shape:
        return saved
    if isinstance(partner, FlatPart):
        return partner.like(partner.cut(saved))
    box = box_of(partner, "a live tensor")
    if box is None:
        return sharded_like(partner, local_part(partner).detach())
    return sharded_like(partner, saved[box.slices].clone())


def fill(live: Any, saved: Any) -> None:
    """Copies a saved tensor into a live one of the same shape, each rank its own part."""
    source, target = local_part(part_like(live, saved)), local_part(live)
    with torch.no_grad():
        if target.numel():  # of a rank outside the mesh, nothing
            target.copy_(source)
