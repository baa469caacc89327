"""Whether boxes tile a tensor, against counting every element."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from resumekit.serialization.sharding import Box, Layout


def tiling_problem(shape: tuple[int, ...], boxes: list[Box]) -> str | None:
    return Layout.of_chunks([(0, box) for box in boxes]).tiling_problem(shape)


def tiles(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    count = np.zeros(shape, int)
    for box in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
    return bool((count == 1).all())


@pytest.mark.parametrize("seed", range(20))
def test_a_tiling_is_distinguished_from_all_others(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(2, 6) for _ in range(draw.randint(1, 3)))
    cuts = [sorted({0, size, *draw.sample(range(1, size), 1)}) for size in shape]
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    boxes = [
        Box(tuple(a for a, _ in part), tuple(b - a for a, b in part))
        for part in itertools.product(*spans)
    ]
    assert tiling_problem(shape, boxes) is None
    for _ in range(20):
        changed = list(boxes)
        index = draw.randrange(len(changed))
        sizes = tuple(draw.randint(1, size) for size in shape)
        offsets = tuple(draw.randint(0, w - n) for w, n in zip(shape, sizes, strict=True))
        changed[index] = Box(offsets, sizes)
        assert (tiling_problem(shape, changed) is None) == tiles(shape, changed)


def test_the_error_names_what_is_wrong() -> None:
    assert tiling_problem((4,), [Box((0,), (2,))]) == "its parts miss 2 of its elements"
    twice = [Box((0,), (3,)), Box((0,), (3,))]
    assert tiling_problem((4,), twice) == "its parts overlap by 2 of its elements"
    swapped = [Box((0,), (2,)), Box((0,), (2,))]
    assert tiling_problem((4,), swapped) == "its parts overlap or leave a gap at [0]"
    assert "[3:5]" in str(tiling_problem((4,), [Box((3,), (2,))]))
    assert tiling_problem((), [Box((), ())]) is None
    assert tiling_problem((0, 3), []) is None
    many = [Box((0,) * 9, (1,) * 9), Box((1,) * 9, (1,) * 9)]
    assert "dimensions" in str(tiling_problem((2,) * 9, many * 256))
