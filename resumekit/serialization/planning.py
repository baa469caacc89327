"""Plans a sharded save: what each rank holds of a state, and which rank writes which part.

Tensors that are sharded alike are planned once: rank 0's work grows with ranks times tensors, and
is small for each.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from torch import Tensor

from resumekit.errors import RankDisagreementError, UnsupportedValueError
from resumekit.serialization.encoding import Encoder
from resumekit.serialization.index import Chunk, Logical, part_name
from resumekit.serialization.sharding import (
    Box,
    FlatPart,
    boxes_of,
    is_sharded,
    local_part,
    pieces_of,
    tiling_problem,
)
from resumekit.serialization.state_paths import StatePath
from resumekit.serialization.tensors import FoundTensor, Leaf


@dataclass(frozen=True)
class LocalState:
    """A state as one rank holds it.

    Args:
        key: the component's key.
        tree: everything except tensors, which it refers to by name.
        tensors: the live tensors by name, sharded or plain.
        found: the part of each in this rank's memory.
        leaves: bytes that are no tensors, equal on every rank.
        ties: names of tensors that are the same tensor as another name.
        first_rank_only: the plain tensors that may differ between the ranks; rank 0's are stored.
    """

    key: str
    tree: Any
    tensors: dict[str, Any]
    found: dict[str, FoundTensor]
    leaves: dict[str, Leaf]
    ties: dict[str, str]
    first_rank_only: frozenset[str] = frozenset()

    @property
    def layout(self) -> Any:
        """All that a plan depends on; equal layouts have the same plan."""
        tensors = {
            name: (tensor.dtype, tensor.shape, local_part(tensor).shape, sharding_of(tensor))
            for name, tensor in self.tensors.items()
        }
        return tensors, self.ties, self.first_rank_only

    def leaves_of(self, name: str) -> Iterator[tuple[str, Leaf]]:
        """This rank's parts of a tensor, each with the name that it is stored under."""
        found = self.found[name]
        for number, piece in enumerate(pieces_of(self.tensors[name])):
            yield part_name(name, number), FoundTensor(piece, found.path, name).leaf()


def encode_local(key: str, state: Any, *, first_rank_only: Collection[str] = ()) -> LocalState:
    """The state of one component as this rank holds it; nothing is copied.

    Args:
        key: the component's key.
        state: nested state; tensors are named by their path in it, a model's by FQN.
        first_rank_only: names of plain tensors that may differ between the ranks.

    Raises:
        UnsupportedValueError: a value cannot be stored; names its path.
    """
    return _LocalEncoder().local_state(key, state, frozenset(first_rank_only))


def sharding_of(tensor: Any) -> Any:
    """The mesh and the placements of a DTensor; None for a plain tensor. Equal for equal ones."""
    if isinstance(tensor, FlatPart):
        return tensor.begin
    return (tensor.device_mesh, tuple(tensor.placements)) if is_sharded(tensor) else None


class _LocalEncoder(Encoder):
    """Notes tensors by name instead of arranging them, and takes DTensors by their local part."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[str, Any] = {}
        self.found: dict[str, FoundTensor] = {}
        self.ties: dict[str, str] = {}
        self._owners: dict[Any, str] = {}
        self._by_type[FlatPart] = self._flat

    def local_state(self, key: str, state: Any, first_rank_only: frozenset[str]) -> LocalState:
        tree = self.encode(state, where=key)
        return LocalState(
            key, tree, self.tensors, self.found, self._leaves, self.ties, first_rank_only
        )

    def _flat(self, value: FlatPart, path: StatePath, _: int) -> Any:
        found = FoundTensor(value.local, path, self._name(path))
        # A tie is the same object twice, which ranks with an empty part see too.
        return self._note(value, found, id(value))

    def _tensor(self, value: Tensor, path: StatePath) -> Any:
        found = FoundTensor(local_part(value), path, self._name(path))
        self._found.append(found)  # where a tensor as a key is noticed
        view = (found.view, tuple(value.shape), sharding_of(value))
        return self._note(value, found, None if found.is_unaliased else view)

    def _note(self, tensor: Any, found: FoundTensor, identity: object) -> Any:
        """The node of a tensor; equal identities are ties, None is equal to nothing."""
        name = found.name
        first = name if identity is None else self._owners.setdefault(identity, name)
        if first == name:
            self.tensors[name] = tensor
            self.found[name] = found
        else:
            self.ties[name] = first
        return {"$tensor": first}


_MOST_NAMED = 3

# Every rank reads what all ranks hold. In a thousand files, a thousand step counts would cost each
# rank a thousand blocks.
_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Proposal:
    """What one rank could write of a component; sent to the first rank of its group.

    Args:
        parts: the different parts that it holds of its tensors, each a box or several, none of
            them empty.
        part_numbers: by name of a tensor, the number of the part that it holds.
        signature: a digest of the names, types and whole shapes of all tensors.
    """

    parts: tuple[tuple[Box, ...], ...]
    part_numbers: dict[str, int]
    signature: str

    @classmethod
    def of(cls, local: LocalState, position: int) -> Proposal:
        """What this rank could write.

        Args:
            local: the state as this rank holds it.
            position: of this rank in its group, from 0.

        Raises:
            UnsupportedValueError: a DTensor's part is unknown; names it.
        """
        known: dict[object, tuple[Box, ...]] = {}
        numbers: dict[tuple[Box, ...], int] = {}
        part_numbers: dict[str, int] = {}
        for name, tensor in local.tensors.items():
            kind = (tensor.shape, local_part(tensor).shape, sharding_of(tensor))
            if kind not in known:
                known[kind] = boxes_of(tensor, f"{local.key}: {name}")
            part = known[kind]
            if part and not (position and _is_first_ranks(local, name)):
                part_numbers[name] = numbers.setdefault(part, len(numbers))
        return cls(tuple(numbers), part_numbers, _signature(local))


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
    """What each rank is to write; parts that several ranks hold are divided among them.

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
    chosen = _choose_writers(local, _rotations(local, proposals, ranks))
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
        Assignment(tuple(names[rank]), None if position else tensors)
        for position, rank in enumerate(ranks)
    ]


# For each possible choice of writers of a tensor, all its chunks.
_Rotations = tuple[tuple[Chunk, ...], ...]


def _rotations(
    local: LocalState, proposals: Sequence[Proposal], ranks: Sequence[int]
) -> dict[str, _Rotations]:
    """The possible writers of each tensor; one object for all that are sharded alike."""
    for rank, proposal in zip(ranks, proposals, strict=True):
        for name in proposal.part_numbers:
            if name not in local.tensors:
                raise _not_tied(local, name, rank)
    alike: dict[object, _Rotations] = {}
    found: dict[str, _Rotations] = {}
    for name, tensor in local.tensors.items():
        shape, row = tuple(tensor.shape), [each.part_numbers.get(name) for each in proposals]
        kind = (shape, *row)
        if kind not in alike:
            holders: dict[tuple[Box, ...], list[int]] = {}
            for rank, proposal, number in zip(ranks, proposals, row, strict=True):
                if number is not None:
                    holders.setdefault(proposal.parts[number], []).append(rank)
            problem = tiling_problem(shape, (box for boxes in holders for box in boxes))
            if problem is not None:
                raise UnsupportedValueError(f"{local.key}: {name}", found=problem)
            alike[kind] = _rotations_of(holders)
        found[name] = alike[kind]
    return found


def _rotations_of(holders: Mapping[tuple[Box, ...], Sequence[int]]) -> _Rotations:
    """As many as a part has holders; in each, the next holder of a part writes it.

    Choosing a writer for each part of each tensor would balance a little better, but give every
    tensor a separate layout.
    """
    parts = sorted(
        (
            (box, number, ranks)
            for boxes, ranks in holders.items()
            for number, box in enumerate(boxes)
        ),
        key=lambda part: part[0].offsets,
    )
    return tuple(
        tuple(Chunk(ranks[rotation % len(ranks)], box, number) for box, number, ranks in parts)
        for rotation in range(max(map(len, holders.values()), default=1))
    )


def _choose_writers(
    local: LocalState, rotations: Mapping[str, _Rotations]
) -> dict[str, tuple[Chunk, ...]]:
    """The parts of each tensor with the rank that writes each, so that all write about as much."""
    load: Counter[int] = Counter()
    chosen: dict[str, tuple[Chunk, ...]] = {}

    def order(name: str) -> tuple[bool, int]:
        # First those without a choice, then the large ones.
        num_bytes = math.prod(local.tensors[name].shape) * local.found[name].element.num_bytes
        return len(rotations[name]) > 1, -num_bytes

    for name in sorted(rotations, key=order):
        chosen[name] = min(
            rotations[name],
            key=lambda rotation: max((load[chunk.writer] for chunk in rotation), default=0),
        )
        for chunk in chosen[name]:
            load[chunk.writer] += chunk.box.num_elements * local.found[name].element.num_bytes
    return chosen


def _is_first_ranks(local: LocalState, name: str) -> bool:
    """Whether rank 0 alone writes a tensor that other ranks hold as well."""
    tensor = local.tensors[name]
    if is_sharded(tensor):
        return False
    return name in local.first_rank_only or tensor.numel() * tensor.element_size() < _SMALL_BYTES


def _signature(local: LocalState) -> str:
    # A rank whose part is empty cannot see that two names are one tensor.
    named = {**local.tensors, **{name: local.tensors[other] for name, other in local.ties.items()}}
    lines = [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in named.items()]
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
        found=f"a separate tensor on rank {rank}, tied to {other!r} on other ranks",
        expected="the same ties on all ranks",
        remedy="Tie the tensors on every rank, or on none",
    )
