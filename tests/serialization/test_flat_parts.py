"""Tensors cut without regard to their rows: element ranges as boxes, written, and read by all."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch

from resumekit.errors import UnsupportedValueError
from resumekit.serialization.planning import Proposal, encode_local
from resumekit.serialization.reading import StoredSource, read_sharded
from resumekit.serialization.sharding import (
    FlatPart,
    Layout,
    boxes_of,
    fill,
    part_like,
    pieces_of,
)
from resumekit.serialization.writing import Payload

SHAPES = [(), (1,), (7,), (5, 3), (1, 9), (4, 1), (3, 2, 4), (2, 1, 3, 2), (0, 4)]


def cut(whole: torch.Tensor, begin: int, end: int) -> FlatPart:
    return FlatPart(whole.shape, begin, whole.reshape(-1)[begin:end].clone())


def cuts(seed: int, length: int, num_ranks: int) -> list[int]:
    draw = random.Random(seed)
    return [0, *sorted(draw.randint(0, length) for _ in range(num_ranks - 1)), length]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(8))
def test_element_ranges_are_boxes_that_tile_the_tensor(shape: tuple[int, ...], seed: int) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    ends = cuts(seed, whole.numel(), 4)
    found = torch.full(shape, -1)
    boxes = []
    for begin, end in itertools.pairwise(ends):
        part = cut(whole, begin, end)
        for box, piece in zip(boxes_of(part, ""), pieces_of(part), strict=begin < end):
            boxes.append(box)
            found[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = (
                piece
            )
        assert len(part.boxes()) <= max(1, 2 * len(shape) - 1)
        rows = part.rows()
        memory = whole[
            tuple(slice(o, o + n) for o, n in zip(rows.offsets, rows.sizes, strict=True))
        ]
        assert torch.equal(part.cut(memory), part.local)
        assert torch.equal(part.cut(whole), part.local)
    assert Layout.of_chunks([(0, box) for box in boxes]).tiling_problem(shape) is None
    assert torch.equal(found, whole)


def written(checkpoints: Any, ranks: Any, parts: list[dict[str, Any]]) -> Any:
    local = [encode_local("model", state) for state in parts]
    proposals = [Proposal.of(each, rank) for rank, each in enumerate(local)]
    assignments = ranks.assigned(local, proposals)
    payloads = [
        Payload.of_shards("state", rank, each, assignments[rank]) for rank, each in enumerate(local)
    ]
    return checkpoints.commit(
        lambda staging: [entry for each in payloads for entry in each.write(staging)]
    )


def state_of(whole: dict[str, torch.Tensor], ends: dict[str, list[int]], rank: int) -> Any:
    return {name: cut(w, ends[name][rank], ends[name][rank + 1]) for name, w in whole.items()}


@pytest.mark.parametrize("seed", range(4))
def test_every_cut_reads_its_ranges_of_every_other(checkpoints: Any, ranks: Any, seed: int) -> None:
    whole = {str(s): torch.randn(s) for s in SHAPES}
    ends = {name: cuts(seed, w.numel(), 3) for name, w in whole.items()}
    step = written(checkpoints, ranks, [state_of(whole, ends, rank) for rank in range(3)])
    source = StoredSource(step, "state", "model", ("index.json",))
    found, _ = read_sharded(source, lambda state: ())
    for name, w in whole.items():
        assert torch.equal(found[name], w)
    others = {name: cuts(seed + 9, w.numel(), 2) for name, w in whole.items()}
    for rank in range(2):
        live = state_of(whole, others, rank)

        def onto(state: Any, live: dict[str, Any] = live) -> list[tuple[Any, Any]]:
            return [(state[name], live[name]) for name in live]

        found, _ = read_sharded(source, onto)
        for name, part in live.items():
            assert torch.equal(found[name].local, part.local)
    with ranks.rank(1, 3):
        shards = {"(5, 3)": ranks.shard(whole["(5, 3)"], (3,), 0)}
        found, _ = read_sharded(source, lambda state: [(state[n], shards[n]) for n in shards])
        assert torch.equal(found["(5, 3)"].to_local(), whole["(5, 3)"][2:4])


def test_one_part_under_two_names_is_a_tie_even_where_it_is_empty(
    checkpoints: Any, ranks: Any
) -> None:
    whole = torch.randn(4, 3)
    parts = [cut(whole, 0, 0), cut(whole, 0, 12)]
    step = written(checkpoints, ranks, [{"a": part, "b": part} for part in parts])
    source = StoredSource(step, "state", "model", ("index.json",))
    found, _ = read_sharded(source, lambda state: ())
    assert found["a"] is found["b"]


def test_a_name_that_a_part_needs_is_refused(checkpoints: Any, ranks: Any) -> None:
    whole = torch.randn(4, 3)
    states = [{name: cut(whole, *ends) for name in ("w", "w#2")} for ends in ((0, 1), (1, 12))]
    with pytest.raises(UnsupportedValueError, match=r"model: w#2.*another tensor"):
        written(checkpoints, ranks, states)
    with pytest.raises(UnsupportedValueError, match="miss 1"):
        written(checkpoints, ranks, [{"w": cut(whole, 1, 12)}])


def test_a_range_is_filled_from_a_whole_tensor_and_from_a_range() -> None:
    whole = torch.randn(4, 3)
    live = cut(torch.zeros(4, 3), 2, 7)
    fill(live, whole)
    assert torch.equal(live.local, whole.reshape(-1)[2:7])
    assert torch.equal(part_like(live, whole).local, live.local)
