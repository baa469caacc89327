"""What planning costs with many ranks and tensors: counted, because a clock depends on the machine.

Nothing may grow faster than ranks times tensors, and an index not even so fast.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from resumekit.serialization import (
    Assignment,
    Proposal,
    ShardedPayload,
    assign,
    encode_local,
    fetching,
)
from resumekit.serialization import planning as plan_module
from resumekit.serialization.planning import LocalState
from resumekit.serialization.sharding import Box, box_of, local_part

SHAPES = ((96, 4), (33, 2), (7,))


def states(ranks: Any, mesh: Sequence[int], dimensions: Sequence[int | None], count: int) -> Any:
    """The state of this rank: tensors of few shapes, and a count of steps for each."""
    state: dict[str, Any] = {}
    for number in range(count):
        whole = torch.zeros(SHAPES[number % len(SHAPES)])
        state[f"{number:05d}.weight"] = ranks.shard(whole, mesh, *dimensions)
        state[f"{number:05d}.step"] = torch.tensor(1.0)
    return state


def planned(
    ranks: Any,
    mesh: Sequence[int],
    count: int,
    dimensions: Sequence[int | None] = (0,),
) -> tuple[list[LocalState], list[Proposal], list[Assignment]]:
    """What all ranks of a job propose, and are to write."""
    local, proposals = [], []
    num_ranks = int(torch.Size(mesh).numel())
    for rank in range(num_ranks):
        with ranks.rank(rank, num_ranks):
            local.append(encode_local("model", states(ranks, mesh, dimensions, count)))
            proposals.append(Proposal.of(local[-1], rank))
    return local, proposals, assign(local[0], proposals)


def index_of(local: LocalState, assignment: Assignment) -> dict[str, Any]:
    payload = ShardedPayload("model", 0, local, assignment)
    index: dict[str, Any] = json.loads(payload._small_files["model/index.json"])
    return index


def num_parts(index: dict[str, Any]) -> int:
    return sum(map(len, index["layouts"]))


def test_tensors_that_are_sharded_alike_are_planned_once(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    for name in ("boxes_of", "tiling_problem"):
        original = getattr(plan_module, name)

        def count(*given: Any, name: str = name, original: Any = original) -> Any:
            counted[name] += 1
            return original(*given)

        monkeypatch.setattr(plan_module, name, count)
    found = []
    for num_ranks, num_tensors in ((4, 30), (4, 60), (8, 30)):
        counted.clear()
        planned(ranks, (num_ranks,), num_tensors)
        found.append((counted["boxes_of"] / num_ranks, counted["tiling_problem"]))
    kinds = len(SHAPES) + 1  # and the counts of steps
    assert found == [(kinds, kinds)] * 3


def test_proposals_grow_with_ranks_times_tensors(ranks: Any) -> None:
    def num_bytes(num_ranks: int, num_tensors: int) -> int:
        _, proposals, _ = planned(ranks, (num_ranks,), num_tensors)
        assert all(len(each.parts) <= len(SHAPES) + 1 for each in proposals)
        return sum(len(pickle.dumps(each)) for each in proposals)

    small = num_bytes(4, 60)
    assert num_bytes(8, 60) < 2.1 * small
    assert num_bytes(4, 120) < 2.1 * small


def test_the_index_grows_with_ranks_and_with_tensors_but_not_with_both(ranks: Any) -> None:
    def size(num_ranks: int, num_tensors: int) -> tuple[int, int]:
        local, _, assignments = planned(ranks, (num_ranks,), num_tensors)
        index = index_of(local[0], assignments[0])
        return num_parts(index), len(json.dumps(index))

    parts, num_bytes = size(4, 60)
    more_tensors, more_ranks, more_of_both = size(4, 120), size(8, 60), size(8, 120)
    assert more_tensors[0] == parts
    assert more_ranks[0] <= 2 * parts
    assert more_of_both[0] == more_ranks[0]
    added = (more_tensors[1] - num_bytes) + (more_ranks[1] - num_bytes)
    assert more_of_both[1] <= num_bytes + added + 200  # numbers of more digits


def test_copies_are_shared_evenly_and_in_few_ways(ranks: Any) -> None:
    local, _, assignments = planned(ranks, (2, 4), 61, (None, 0))
    written = [
        sum(local_part(local[rank].tensors[name]).nbytes for name in given.names)
        for rank, given in enumerate(assignments)
    ]
    pairs = [written[shard] + written[shard + 4] for shard in range(4)]
    for shard in range(4):
        assert max(written[shard], written[shard + 4]) <= pairs[shard] / 2 + 96 // 4 * 4 * 4
    ways = Counter(
        row["layout"]
        for name, row in index_of(local[0], assignments[0])["tensors"].items()
        if name.endswith("weight")
    )
    assert len(ways) <= 2 * len(SHAPES)


def test_every_part_is_written_by_one_rank_that_holds_it(ranks: Any) -> None:
    local, proposals, assignments = planned(ranks, (3, 2), 12, (None, 0))
    given = [(name, rank) for rank, each in enumerate(assignments) for name in each.names]
    assert len(set(given)) == len(given)
    assert all(name in proposals[rank].part_numbers for name, rank in given)
    tensors = assignments[0].tensors
    assert tensors is not None
    assert {(n, c.writer) for n, each in tensors.items() for c in each.chunks} == set(given)
    assert list(tensors) == list(local[0].tensors)


def test_reads_of_tensors_that_are_sharded_alike_are_planned_once(
    ranks: Any, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resumekit.serialization.index import ShardedIndex

    local, _, assignments = planned(ranks, (8,), 30)
    data = ShardedPayload("model", 0, local[0], assignments[0])._small_files["model/index.json"]
    assert data is not None
    tensors = ShardedIndex.from_bytes(data, where="index").tensors
    asked: list[Box] = []
    original = fetching.find_overlaps

    def counted(chunks: Any, box: Box) -> Any:
        asked.append(box)
        return original(chunks, box)

    monkeypatch.setattr(fetching, "find_overlaps", counted)
    with ranks.rank(1, 3):
        live = states(ranks, (3,), (0,), 30)
        wanted = {name: box_of(tensor, name) or Box((), ()) for name, tensor in live.items()}
    fetches = fetching.plan_fetches(tensors, wanted)
    assert len(asked) == len(SHAPES) + 1  # and the counts of steps
    elements = Counter(dict.fromkeys(wanted, 0))
    for fetch in fetches:
        elements[fetch.name] += fetch.wanted.num_elements
    assert elements == {name: box.num_elements for name, box in wanted.items()}
