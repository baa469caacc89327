"""Tensors of which every rank holds a part: what part that is, who wrote it, and how to make one.

torch's DTensor is asked for only where a program has loaded it: importing it takes a second.

A layout has a row for each part, in columns of NumPy arrays: thousands of ranks are checked and
searched at once. On disk each column is a few runs where the parts follow a mesh.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from resumekit.errors import UnsupportedValueError
from resumekit.serialization.encoding import MAX_SIZE, typed
from resumekit.serialization.leaves import ElementType
from resumekit.serialization.tensors import is_subclass, parts_of

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


def sharding_of(tensor: Any) -> Any:
    """The mesh and the placements of a DTensor; None for a plain tensor. Equal for equal ones."""
    if isinstance(tensor, FlatPart):
        return tensor.begin
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else None


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
    return kind(local, replace(spec, tensor_meta=meta), requires_grad=False)


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
    spec = replace(
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
    """Copies a saved tensor into a live one of the same kind, each rank its own part."""
    if is_subclass(live):  # its own copy may round
        for name, part in parts_of(live).parts.items():
            fill(part, parts_of(saved).parts[name])
    elif (target := local_part(live)).numel():  # of a rank outside the mesh, nothing
        with torch.no_grad():
            target.copy_(local_part(part_like(live, saved)))


# ---------------------------------------------------------------- which rank wrote which part

Column = NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """A stored part of a tensor; stored in its writer's data file under ``part_name``.

    Args:
        writer: the rank that wrote it.
        box: which part it is.
        number: of this part among its writer's parts of the tensor, in the order of the layout.
    """

    writer: int
    box: Box
    number: int = 0


def part_name(name: str, number: int) -> str:
    """What a part of a tensor is called in its writer's data file."""
    return f"{name}#{number + 1}" if number else name


@dataclass(frozen=True, eq=False)
class Layout:
    """The parts of a tensor; a row for each.

    Args:
        writers: the rank that wrote each.
        offsets: where each begins, with a column for each dimension of the tensor.
        sizes: how far it goes, likewise.
    """

    writers: Column
    offsets: Column
    sizes: Column

    @classmethod
    def of_chunks(cls, rows: Sequence[tuple[int, Box]]) -> Layout:
        """The layout of boxes with the writer of each.

        Raises:
            ValueError: the boxes differ in their number of dimensions.
        """
        if not rows:
            return cls(*(np.zeros(shape, np.int64) for shape in ((0,), (0, 0), (0, 0))))
        if len({len(each) for _, box in rows for each in (box.offsets, box.sizes)}) > 1:
            raise ValueError("parts with different numbers of dimensions")
        return cls(
            np.array([writer for writer, _ in rows], np.int64),
            np.array([box.offsets for _, box in rows], np.int64),
            np.array([box.sizes for _, box in rows], np.int64),
        )

    def __len__(self) -> int:
        return len(self.writers)

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks(range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)

    @cached_property
    def _content(self) -> tuple[object, ...]:
        columns = (self.writers, self.offsets, self.sizes)
        return (self.offsets.shape, *(column.tobytes() for column in columns))

    @cached_property
    def _numbers(self) -> Column:
        """Of each part among those of its writer."""
        if len(self) == 1:
            return np.zeros(1, np.int64)
        order = np.argsort(self.writers, kind="stable")
        ordered = self.writers[order]
        begins = np.searchsorted(ordered, ordered)
        numbers = np.empty(len(self), np.int64)
        numbers[order] = np.arange(len(self)) - begins
        return numbers

    def _chunks(self, rows: Sequence[int]) -> Iterator[Chunk]:
        for row in rows:
            box = Box(tuple(self.offsets[row].tolist()), tuple(self.sizes[row].tolist()))
            yield Chunk(int(self.writers[row]), box, int(self._numbers[row]))

    def near(self, box: Box) -> Iterator[Chunk]:
        """The parts that overlap a box; for an empty box perhaps others too."""
        if not len(self):
            return
        begins = np.array(box.offsets, np.int64)
        ends = begins + np.array(box.sizes, np.int64)
        hits = (self.offsets < ends) & (self.offsets + self.sizes > begins)
        yield from self._chunks(np.flatnonzero(hits.all(axis=1)).tolist())

    def tiling_problem(self, shape: Sequence[int]) -> str | None:
        """What is wrong with parts that should tile a tensor; None when they do.

        Signed corners determine a sum of boxes, so boxes tile the tensor if and only if their
        corners add up to those of the tensor.

        Args:
            shape: of the whole tensor.
        """
        num_elements = math.prod(shape)
        if not len(self):
            return f"its parts miss {num_elements} of its elements" if num_elements else None
        if self.offsets.shape[1] != len(shape):
            return f"parts of {self.offsets.shape[1]} dimensions are not within the shape {shape}"
        whole = np.array(shape, np.int64)
        outside = (self.sizes < 1) | (self.offsets < 0) | (self.offsets + self.sizes > whole)
        if outside.any():
            (chunk,) = self._chunks([int(outside.any(axis=1).argmax())])
            return f"the part {chunk.box} is not within the shape {tuple(shape)}"
        # A dimension that nobody splits adds nothing, and doubles the corners.
        split = np.flatnonzero((self.sizes != whole).any(axis=0))
        if len(split) > _MAX_SPLIT or len(self) << len(split) > _MAX_CORNERS:
            return (
                f"its {len(self)} parts split {len(split)} dimensions, at most {_MAX_SPLIT} can be"
            )
        missing = num_elements - sum(self.sizes.prod(axis=1).tolist())
        if missing:
            word = "miss" if missing > 0 else "overlap by"
            return f"its parts {word} {abs(missing)} of its elements"
        corner = self._uneven_corner(whole, split) if len(split) else None
        return None if corner is None else f"its parts overlap or leave a gap at {corner}"

    def _uneven_corner(self, whole: Column, split: Column) -> list[int] | None:
        """The first corner of a gap or an overlap, in the dimensions that are split."""
        begins = np.vstack([self.offsets, np.zeros_like(whole)])[:, split]
        sides = (begins, begins + np.vstack([self.sizes, whole])[:, split])
        signs = np.append(np.ones(len(self), np.int64), -1)
        corners, signed = [], []
        for chosen in product((0, 1), repeat=len(split)):
            columns = [sides[side][:, column] for column, side in enumerate(chosen)]
            corners.append(np.stack(columns, axis=1))
            signed.append(signs * (-1) ** sum(chosen))
        points, weights = np.concatenate(corners), np.concatenate(signed)
        order = np.lexsort(points.T[::-1])
        points, weights = points[order], weights[order]
        is_new = np.append(True, (points[1:] != points[:-1]).any(axis=1))
        begin_of = np.flatnonzero(is_new)
        uneven = np.flatnonzero(np.add.reduceat(weights, begin_of))
        return None if not len(uneven) else [int(each) for each in points[begin_of[uneven[0]]]]

    @property
    def num_values(self) -> int:
        """The numbers in it."""
        return self.writers.size + self.offsets.size + self.sizes.size

    def to_json(self) -> dict[str, Any]:
        """Its columns as runs."""
        return {
            "writers": to_runs(self.writers),
            "offsets": [to_runs(column) for column in self.offsets.T],
            "sizes": [to_runs(column) for column in self.sizes.T],
        }

    @classmethod
    def from_json(cls, row: Any, *, max_values: int, max_parts: int) -> Layout:
        """The inverse of ``to_json``, of JSON that may hold anything.

        Args:
            row: the JSON.
            max_values: how many numbers it may have: a run of many is short.
            max_parts: how many parts.

        Raises:
            ValueError: says what is wrong with it.
        """
        if set(typed(dict, row)) != {"writers", "offsets", "sizes"}:
            raise ValueError(f"a layout has the fields {str(sorted(row))[:200]}")
        offsets, sizes = typed(list, row["offsets"]), typed(list, row["sizes"])
        if len(offsets) != len(sizes):
            raise ValueError(f"a layout of {len(offsets)} and {len(sizes)} dimensions")
        max_length = min(max_parts, max_values // (1 + 2 * len(offsets)))
        writers = from_runs(row["writers"], max_length=max_length)
        columns = [from_runs(runs, max_length=len(writers)) for runs in (*offsets, *sizes)]
        if any(len(column) != len(writers) for column in columns):
            raise ValueError("a layout with columns of different lengths")
        table = np.array(columns, np.int64).reshape(len(columns), len(writers)).T
        return cls(writers, *map(np.ascontiguousarray, np.hsplit(table, 2)))


# One for each dimension of a device mesh; the corners of a box are two to this power.
_MAX_SPLIT = 8
_MAX_CORNERS = 1 << 23


def to_runs(values: Column) -> list[list[int]]:
    """Numbers as runs ``[first, step, count]``."""
    steps = np.diff(values)
    ends = [*(np.flatnonzero(np.diff(steps)) + 1).tolist(), len(steps)]  # where a step changes
    numbers, distances = values.tolist(), steps.tolist()
    runs: list[list[int]] = []
    begin = segment = 0
    while begin < len(numbers):
        if begin == len(numbers) - 1:
            runs.append([numbers[begin], 0, 1])
            break
        while ends[segment] <= begin:
            segment += 1
        count = ends[segment] + 1 - begin
        runs.append([numbers[begin], distances[begin], count])
        begin += count
    return runs


def from_runs(runs: Any, *, max_length: int) -> Column:
    """The inverse of ``to_runs``, of JSON that may hold anything.

    Raises:
        ValueError: it is no list of runs, has a number that is no size, or is too long.
    """
    length = 0
    for run in typed(list, runs):
        if type(run) is not list or len(run) != 3 or any(type(each) is not int for each in run):
            raise ValueError(f"{str(run)[:80]!r} is not a run of numbers")
        first, step, count = run
        length += count
        ends = (first, first + step * (count - 1), abs(step))
        if count < 1 or not all(0 <= each <= MAX_SIZE for each in ends) or length > max_length:
            raise ValueError(f"the run of numbers {str(run)[:80]}, at most {max_length} in all")
    table: Column = np.array(runs, np.int64).reshape(len(runs), 3)
    firsts, steps, counts = table.T
    within = np.arange(length) - np.repeat(np.cumsum(counts) - counts, counts)
    found: Column = np.repeat(firsts, counts) + np.repeat(steps, counts) * within
    return found


@dataclass(frozen=True)
class Logical:
    """A whole tensor, as the ranks hold it together.

    Args:
        element: the type of its elements.
        shape: its whole shape.
        chunks: its parts; none where it has no elements.
    """

    element: ElementType
    shape: tuple[int, ...]
    chunks: Layout

    @classmethod
    def of_one_writer(cls, element: ElementType, shape: tuple[int, ...], writer: int) -> Logical:
        """A tensor that one rank writes whole."""
        parts = [] if 0 in shape else [(writer, Box.whole(shape))]
        return cls(element, shape, Layout.of_chunks(parts))
