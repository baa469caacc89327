"""Who writes which part, as torch.distributed.checkpoint plans it.

It is imported where it is needed, because it takes a second to load.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import xxhash

from resumekit.errors import RankDisagreementError, UnsupportedValueError
from resumekit.payload.sharded.cover import tiling_problem
from resumekit.payload.sharded.encode import LocalState
from resumekit.payload.sharded.index import Chunk, Logical
from resumekit.sharding import Box, box_of, is_sharded

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem

_MOST_NAMED = 3

# Every rank reads all of what every rank holds. Spread over a thousand files, a thousand counts of
# steps would cost each rank a thousand blocks.
_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Proposal:
    """What one rank could write of a component; it travels to the first rank of its group.

    Args:
        plan: torch's local save plan, without empty parts.
        signature: a digest of the names, types and whole shapes of all tensors.
    """

    plan: SavePlan
    signature: str

    @classmethod
    def of(cls, local: LocalState, place: int) -> Proposal:
        """What this rank could write.

        Args:
            local: the state as this rank holds it.
            place: of this rank in its group, from 0.

        Raises:
            UnsupportedValueError: a DTensor's part cannot be told; names it.
        """
        from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

        for name, tensor in local.tensors.items():
            box_of(tensor, f"{local.key}: {name}")
        mine = {
            name: tensor
            for name, tensor in local.tensors.items()
            if place == 0 or not _is_first_ranks(local, name)
        }
        plan = create_default_local_save_plan(mine, place == 0)
        items = [item for item in plan.items if _box(item).num_elements]
        return cls(replace(plan, items=items), _signature(local))


@dataclass(frozen=True)
class Assignment:
    """What a rank is to write of a component.

    Args:
        names: the tensors of which it writes its part.
        tensors: on the first rank, where the parts of each tensor are.
    """

    names: tuple[str, ...]
    tensors: dict[str, Logical] | None = None


def assign(
    local: LocalState, proposals: Sequence[Proposal], ranks: Sequence[int] | None = None
) -> list[Assignment]:
    """What each rank is to write; parts that several ranks hold are spread over them.

    Args:
        local: the state as the first rank holds it.
        proposals: of every rank of a group, in rank order.
        ranks: their global ranks; by default 0 and on.

    Raises:
        RankDisagreementError: the ranks' states are not parts of one state.
        UnsupportedValueError: the parts of a tensor overlap, or some are missing; names it.
    """
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    ranks = range(len(proposals)) if ranks is None else ranks
    _require_one_state(local.key, proposals, ranks)
    planner = DefaultSavePlanner(flatten_state_dict=False)
    try:
        plans, _ = planner.create_global_plan([proposal.plan for proposal in proposals])
    except ValueError as error:  # its own check: parts that overlap, or are not all there
        raise _refused(local, proposals) or UnsupportedValueError(
            local.key, found=f"parts that torch's planner refuses: {error}"
        ) from error
    chunks: dict[str, list[Chunk]] = {name: [] for name in local.tensors}
    names: list[tuple[str, ...]] = []
    for rank, plan in zip(ranks, plans, strict=True):
        for item in plan.items:
            chunks[item.index.fqn].append(Chunk(rank, _box(item)))
        names.append(tuple(item.index.fqn for item in plan.items))
    tensors = {
        name: Logical(
            local.found[name].element,
            tuple(local.tensors[name].shape),
            tuple(sorted(parts, key=lambda chunk: chunk.box.offsets)),
        )
        for name, parts in chunks.items()
    }
    for name, logical in tensors.items():
        problem = tiling_problem(logical.shape, (chunk.box for chunk in logical.chunks))
        if problem is not None:
            raise UnsupportedValueError(f"{local.key}: {name}", found=problem)
    return [Assignment(given, None if place else tensors) for place, given in enumerate(names)]


def _is_first_ranks(local: LocalState, name: str) -> bool:
    """Whether the first rank alone writes a tensor that other ranks hold as well."""
    tensor = local.tensors[name]
    if is_sharded(tensor):
        return False
    return name in local.first_rank_only or tensor.numel() * tensor.element_size() < _SMALL_BYTES


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None  # everything in the plan is a tensor
    chunk = item.tensor_data.chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def _signature(local: LocalState) -> str:
    lines = [
        [name, str(tensor.dtype), list(tensor.shape)] for name, tensor in local.tensors.items()
    ]
    # A rank whose part is empty cannot see that two names are one tensor.
    lines += [
        [name, str(local.tensors[other].dtype), list(local.tensors[other].shape)]
        for name, other in local.ties.items()
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps(sorted(lines)).encode("ascii"))


def _require_one_state(key: str, proposals: Sequence[Proposal], ranks: Sequence[int]) -> None:
    others = [
        rank
        for rank, each in zip(ranks, proposals, strict=True)
        if each.signature != proposals[0].signature
    ]
    if others:
        shown = ", ".join(map(str, others[:_MOST_NAMED]))
        raise RankDisagreementError(
            key,
            found=f"rank {shown} has tensors of other names, types or shapes than rank {ranks[0]}",
            expected="parts of one state on all ranks of a group",
            remedy="Give each pipeline stage a process group of its own, or declare it per_rank "
            "where every rank has its own",
        )


def _refused(local: LocalState, proposals: Sequence[Proposal]) -> UnsupportedValueError | None:
    """The first tensor whose parts do not tile it, told by name."""
    boxes: dict[str, dict[Box, None]] = {name: {} for name in local.tensors}
    for proposal in proposals:
        for item in proposal.plan.items:
            boxes[item.index.fqn][_box(item)] = None
    for name, parts in boxes.items():
        problem = tiling_problem(tuple(local.tensors[name].shape), parts)
        if problem is not None:
            return UnsupportedValueError(f"{local.key}: {name}", found=problem)
    return None
