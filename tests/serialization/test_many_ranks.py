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

from resumekit.serialization import data_files
from resumekit.serialization import planning as plan_module
from resumekit.serialization.planning import Assignment, LocalState, Proposal, assign, encode_local
from resumekit.serialization.sharding import Box, FlatPart, Layout, box_of, local_part
from resumekit.serialization.writing import Payload

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
    return local, proposals, ranks.assigned(local, proposals)


def index_of(local: LocalState, assignment: Assignment) -> dict[str, Any]:
    payload = Payload.of_shards("model", 0, local, assignment)
    index: dict[str, Any] = json.loads(payload._small_files["model/index.json"])
    return index


def num_runs(index: dict[str, Any]) -> int:
    """Of the columns of all layouts, each an arithmetic progression."""
    return sum(
        len(runs)
        for layout in index["layouts"]
        for runs in (layout["writers"], *layout["offsets"], *layout["sizes"])
    )


def test_tensors_that_are_sharded_alike_are_planned_once(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: Counter[str] = Counter()
    for module, name in ((plan_module, "boxes_of"), (Layout, "tiling_problem")):
        original = getattr(module, name)

        def count(*given: Any, name: str = name, original: Any = original) -> Any:
            counted[name] += 1
            return original(*given)

        monkeypatch.setattr(module, name, count)
    found = []
    for num_ranks, num_tensors in ((4, 30), (4, 60), (8, 30)):
        counted.clear()
        planned(ranks, (num_ranks,), num_tensors)
        found.append((counted["boxes_of"] / num_ranks, counted["tiling_problem"]))
    kinds = len(SHAPES) + 1  # and the counts of steps
    assert found == [(kinds, kinds)] * 3


def sent_bytes(proposals: Sequence[Proposal]) -> int:
    digests = [each.kinds_digest for each in proposals]
    return sum(
        len(pickle.dumps(each.sent_by(position, digests)))
        for position, each in enumerate(proposals)
    )


def test_proposals_grow_with_ranks_and_with_tensors_but_not_with_both(ranks: Any) -> None:
    def num_bytes(num_ranks: int, num_tensors: int) -> int:
        _, proposals, _ = planned(ranks, (num_ranks,), num_tensors)
        assert all(len(each.parts) <= len(SHAPES) + 1 for each in proposals)
        return sent_bytes(proposals)

    small, more_tensors, more_ranks = num_bytes(4, 60), num_bytes(4, 120), num_bytes(8, 60)
    assert more_tensors - small == 60 * 2 * 4  # one rank says which tensors are of which kind
    assert num_bytes(8, 120) == more_ranks + (more_tensors - small)
    assert more_ranks < 2 * small


def test_ranks_whose_tensors_are_of_other_kinds_say_so(ranks: Any) -> None:
    """Ranks that are cut without regard to rows have no kinds in common."""
    whole = {name: torch.arange(12.0).reshape(4, 3) for name in "abc"}
    ends = {"a": (0, 12, 12, 12), "b": (0, 5, 12, 12), "c": (0, 5, 7, 12)}
    local = [
        encode_local(
            "model",
            {
                name: FlatPart(tensor.shape, begin, tensor.reshape(-1)[begin:end].clone())
                for name, tensor in whole.items()
                for begin, end in [ends[name][rank : rank + 2]]
            },
        )
        for rank in range(3)
    ]
    proposals = [Proposal.of(each, rank) for rank, each in enumerate(local)]
    digests = [each.kinds_digest for each in proposals]
    assert len(set(digests)) > 1
    sent = [each.sent_by(rank, digests) for rank, each in enumerate(proposals)]
    assert [each.names for each in ranks.assigned(local, sent)] == [
        ("a", "b", "c"),
        ("b", "c"),
        ("c",),
    ]


def test_what_a_rank_receives_grows_with_kinds_and_not_with_tensors(ranks: Any) -> None:
    def num_positions(num_ranks: int, num_tensors: int) -> list[int]:
        local, proposals, _ = planned(ranks, (2, num_ranks), num_tensors, (None, 0))
        return [len(each) for each in assign(local[0], proposals).positions]

    assert num_positions(4, 60) == num_positions(4, 120)
    assert max(num_positions(4, 60)) == len(SHAPES) + 1


def test_the_index_grows_with_tensors_and_hardly_with_ranks(ranks: Any) -> None:
    def size(num_ranks: int, num_tensors: int) -> tuple[int, int]:
        local, _, assignments = planned(ranks, (num_ranks,), num_tensors)
        index = index_of(local[0], assignments[0])
        return num_runs(index), len(json.dumps(index))

    runs, num_bytes = size(4, 60)
    more_tensors, more_ranks, more_of_both = size(4, 120), size(8, 60), size(8, 120)
    assert more_tensors[0] == runs
    assert more_ranks[0] <= runs + len(SHAPES)
    assert more_of_both[0] == more_ranks[0]
    assert more_ranks[1] <= num_bytes + 100
    assert more_of_both[1] <= more_tensors[1] + 100


def test_copies_are_divided_evenly_and_in_few_ways(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "_PORTION_BYTES", 1)
    local, _, assignments = planned(ranks, (2, 4), 61, (None, 0))
    written = written_bytes(local, assignments)
    pairs = [written[shard] + written[shard + 4] for shard in range(4)]
    for shard in range(4):
        assert max(written[shard], written[shard + 4]) <= pairs[shard] / 2 + 96 // 4 * 4 * 4
    ways = Counter(
        row["layout"]
        for name, row in index_of(local[0], assignments[0])["tensors"].items()
        if name.endswith("weight")
    )
    assert len(ways) <= 2 * len(SHAPES)


def written_bytes(local: Sequence[LocalState], assignments: Sequence[Assignment]) -> list[int]:
    """What each rank writes."""
    return [
        sum(local_part(local[rank].tensors[name]).nbytes for name in given.names)
        for rank, given in enumerate(assignments)
    ]


@pytest.mark.parametrize("portion", [600, 10**6])
def test_a_reader_of_copies_opens_no_more_files_than_there_are_portions(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, portion: int
) -> None:
    monkeypatch.setattr(plan_module, "_PORTION_BYTES", portion)
    largest = 96 // 2 * 4 * 4
    local, _, assignments = planned(ranks, (4, 2), 30, (None, 0))
    written = written_bytes(local, assignments)
    for shard in range(2):
        copies = [written[rank] for rank in range(shard, 8, 2)]
        num_writers = sum(size > 100 for size in copies)  # the first one writes the counts too
        assert num_writers == min(4, -(-sum(copies) // portion))
        assert max(copies) - min(copies) <= portion + largest


def test_every_part_is_written_by_one_rank_that_holds_it(ranks: Any) -> None:
    local, proposals, assignments = planned(ranks, (3, 2), 12, (None, 0))
    given = [(name, rank) for rank, each in enumerate(assignments) for name in each.names]
    assert len(set(given)) == len(given)
    assert all(name in local[rank].tensors for name, rank in given)
    assert all(any(proposals[rank].parts) for _, rank in given)
    tensors = assignments[0].tensors
    assert tensors is not None
    assert {(n, c.writer) for n, each in tensors.items() for c in each.chunks} == set(given)
    assert list(tensors) == list(local[0].tensors)


def test_reads_of_tensors_that_are_sharded_alike_are_planned_once(
    ranks: Any, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resumekit.serialization.index import Index

    local, _, assignments = planned(ranks, (8,), 30)
    data = Payload.of_shards("model", 0, local[0], assignments[0])._small_files["model/index.json"]
    assert data is not None
    tensors = Index.from_bytes(data, where="index", is_common=True).tensors
    asked: list[Box] = []
    original = data_files.find_overlaps

    def counted(chunks: Any, box: Box) -> Any:
        asked.append(box)
        return original(chunks, box)

    monkeypatch.setattr(data_files, "find_overlaps", counted)
    with ranks.rank(1, 3):
        live = states(ranks, (3,), (0,), 30)
        wanted = {name: box_of(tensor, name) or Box((), ()) for name, tensor in live.items()}
    fetches = data_files.plan_fetches(tensors, wanted)
    assert len(asked) == len(SHAPES) + 1  # and the counts of steps
    elements = Counter(dict.fromkeys(wanted, 0))
    for fetch in fetches:
        elements[fetch.name] += fetch.wanted.num_elements
    assert elements == {name: box.num_elements for name, box in wanted.items()}
