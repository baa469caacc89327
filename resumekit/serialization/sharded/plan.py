"""Who writes which part of a state that the ranks hold together.

torch says which part of a tensor a rank holds (``sharding.box_of``), and no two tensors that are
spread alike are planned twice: what rank 0 does grows with ranks times tensors, and does little for
each.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from resumekit.errors import RankDisagreementError, UnsupportedValueError
from resumekit.serialization.sharded.cover import tiling_problem
from resumekit.serialization.sharded.encode import LocalState, spreading
from resumekit.serialization.sharded.index import Logical
from resumekit.serialization.sharded.writers import Holders, choose_writers
from resumekit.serialization.sharding import Box, boxes_of, is_sharded, local_part

_MOST_NAMED = 3

# Every rank reads all of what every rank holds. Spread over a thousand files, a thousand counts of
# steps would cost each rank a thousand blocks.
_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Proposal:
    """What one rank could write of a component; it travels to the first rank of its group.

    Args:
        parts: the different parts that it holds of its tensors, each a box or several, none of
            them empty.
        held: by name of a tensor, the number of the part that it holds.
        signature: a digest of the names, types and whole shapes of all tensors.
    """

    parts: tuple[tuple[Box, ...], ...]
    held: dict[str, int]
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
        known: dict[object, tuple[Box, ...]] = {}
        numbers: dict[tuple[Box, ...], int] = {}
        held: dict[str, int] = {}
        for name, tensor in local.tensors.items():
            kind = (tensor.shape, local_part(tensor).shape, spreading(tensor))
            if kind not in known:
                known[kind] = boxes_of(tensor, f"{local.key}: {name}")
            part = known[kind]
            if part and not (place and _is_first_ranks(local, name)):
                held[name] = numbers.setdefault(part, len(numbers))
        return cls(tuple(numbers), held, _signature(local))


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
    ranks = range(len(proposals)) if ranks is None else ranks
    _require_one_state(local.key, proposals, ranks)
    holders = _holders(local, proposals, ranks)
    chosen = choose_writers(
        (name, held, local.found[name].element.num_bytes) for name, held in holders.items()
    )
    names: dict[int, list[str]] = {rank: [] for rank in ranks}
    for name in local.tensors:
        for chunk in chosen[name]:
            if not chunk.number:
                names[chunk.writer].append(name)
    tensors = {
        name: Logical(local.found[name].element, tuple(tensor.shape), chosen[name])
        for name, tensor in local.tensors.items()
    }
    return [
        Assignment(tuple(names[rank]), None if place else tensors)
        for place, rank in enumerate(ranks)
    ]


def _holders(
    local: LocalState, proposals: Sequence[Proposal], ranks: Sequence[int]
) -> dict[str, Holders]:
    """Who holds the parts of each tensor; one object for all that are spread alike."""
    rows = {name: [-1] * len(proposals) for name in local.tensors}
    for place, proposal in enumerate(proposals):
        for name, number in proposal.held.items():
            if name not in rows:
                raise _not_tied(local, name, ranks[place])
            rows[name][place] = number
    alike: dict[object, Holders] = {}
    found: dict[str, Holders] = {}
    for name, row in rows.items():
        shape = tuple(local.tensors[name].shape)
        kind = (shape, *row)
        if kind not in alike:
            held: dict[tuple[Box, ...], list[int]] = {}
            for place, number in enumerate(row):
                if number >= 0:
                    held.setdefault(proposals[place].parts[number], []).append(ranks[place])
            problem = tiling_problem(shape, (box for boxes in held for box in boxes))
            if problem is not None:
                raise UnsupportedValueError(f"{local.key}: {name}", found=problem)
            alike[kind] = Holders(held)
        found[name] = alike[kind]
    return found


def _is_first_ranks(local: LocalState, name: str) -> bool:
    """Whether rank 0 alone writes a tensor that other ranks hold as well."""
    tensor = local.tensors[name]
    if is_sharded(tensor):
        return False
    return name in local.first_rank_only or tensor.numel() * tensor.element_size() < _SMALL_BYTES


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


def _not_tied(local: LocalState, name: str, rank: int) -> RankDisagreementError:
    other = local.ties.get(name, "another tensor")
    return RankDisagreementError(
        f"{local.key}: {name}",
        found=f"a tensor of its own on rank {rank}, and the same as {other!r} elsewhere",
        expected="the same ties on all ranks",
        remedy="Tie the tensors on every rank, or on none",
    )
