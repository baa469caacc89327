"""Whether boxes tile a tensor: every element in exactly one of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

from resumekit.serialization.sharding import Box

# One for each dimension of a device mesh; the corners of a box are two to this power.
_MOST_SPLIT = 8


def tiling_problem(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """What is wrong with boxes that should tile a tensor; None when they do.

    In time linear in the number of boxes: a sum of boxes is told by its corners, each with a plus
    or a minus sign, so they tile the tensor if and only if their corners add up to its own.

    Args:
        shape: of the whole tensor.
        boxes: none of them empty; none at all for a tensor without elements.
    """
    whole, given = Box.whole(shape), list(boxes)
    corners: Counter[tuple[int, ...]] = Counter()
    num_elements = 0
    for box in given:
        if not _is_within(box, whole):
            return f"the part {box} is not within the shape {tuple(shape)}"
        num_elements += box.num_elements
    # A dimension that nobody splits adds nothing, and doubles the corners.
    split = [d for d, length in enumerate(shape) if any(box.sizes[d] != length for box in given)]
    if len(split) > _MOST_SPLIT:
        return f"its parts split {len(split)} dimensions, at most {_MOST_SPLIT} can be"
    for box in given:
        _add_corners(corners, box, split, 1)
    if num_elements != whole.num_elements:
        word = "miss" if num_elements < whole.num_elements else "overlap by"
        return f"its parts {word} {abs(whole.num_elements - num_elements)} of its elements"
    if whole.num_elements:
        _add_corners(corners, whole, split, -1)
    if any(corners.values()):
        place = min(corner for corner, count in corners.items() if count)
        return f"its parts overlap or leave a gap at {list(place)}"
    return None


def _is_within(box: Box, whole: Box) -> bool:
    if not len(box.offsets) == len(box.sizes) == len(whole.sizes):
        return False
    return all(
        begin >= 0 and size > 0 and begin + size <= length
        for begin, size, length in zip(box.offsets, box.sizes, whole.sizes, strict=True)
    )


def _add_corners(
    corners: Counter[tuple[int, ...]], box: Box, dimensions: Sequence[int], sign: int
) -> None:
    ends = [(box.offsets[d], box.offsets[d] + box.sizes[d]) for d in dimensions]
    for sides in product((0, 1), repeat=len(ends)):
        corner = tuple(end[side] for end, side in zip(ends, sides, strict=True))
        corners[corner] += sign * (-1) ** sum(sides)
