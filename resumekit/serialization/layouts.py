"""The layout of a tensor of which several ranks wrote parts, and which parts hold a wanted box.

A layout has a row for each part, in columns of NumPy arrays, so that thousands of ranks are checked
and searched at once. On disk each column is a list of runs: parts that follow a mesh are a few of
them, however many ranks it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resumekit.serialization.leaves import MAX_SIZE, ElementType, typed
from resumekit.serialization.sharding import Box

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
    def from_json(cls, row: Any, *, max_values: int) -> Layout:
        """The inverse of ``to_json``, of JSON that may hold anything.

        Args:
            row: the JSON.
            max_values: how many numbers it may have: a run of many is short.

        Raises:
            ValueError: says what is wrong with it.
        """
        if set(typed(dict, row)) != {"writers", "offsets", "sizes"}:
            raise ValueError(f"a layout has the fields {str(sorted(row))[:200]}")
        offsets, sizes = typed(list, row["offsets"]), typed(list, row["sizes"])
        if len(offsets) != len(sizes):
            raise ValueError(f"a layout of {len(offsets)} and {len(sizes)} dimensions")
        max_length = max_values // (1 + 2 * len(offsets))
        writers = from_runs(row["writers"], max_length=max_length)
        columns = [from_runs(runs, max_length=len(writers)) for runs in (*offsets, *sizes)]
        if any(len(column) != len(writers) for column in columns):
            raise ValueError("a layout with columns of different lengths")
        table = np.array(columns, np.int64).reshape(len(columns), len(writers)).T
        return cls(
            writers,
            np.ascontiguousarray(table[:, : len(offsets)]),
            np.ascontiguousarray(table[:, len(offsets) :]),
        )


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
