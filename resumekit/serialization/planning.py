"""Plans a sharded save: which rank writes which part of a state.

The state of one rank is its tensors by name, sharded or plain, and all else as a tree.

Tensors that are sharded alike are planned once: what travels and what rank 0 decides grows with
ranks times different shapes. Only the balance between ranks that hold the same part looks at each
tensor, at all ranks in one operation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash
from torch import Tensor

from resumekit.errors import RankDisagreementError, UnsupportedValueError
from resumekit.serialization.encoding import Encoder
from resumekit.serialization.leaves import Leaf
from resumekit.serialization.sharding import (
    Column,
    FlatPart,
    Layout,
    Logical,
    boxes_of,
    is_sharded,
    local_part,
    part_name,
    pieces_of,
    sharding_of,
)
from resumekit.serialization.tensors import FoundTensor, StatePath
from resumekit.storage.files import BLOCK_BYTES

_MOST_NAMED = 3

# Every rank reads what all ranks hold. In a thousand files, a thousand step counts would cost each
# rank a thousand blocks.
_SMALL_BYTES = 64 << 10

# What a writer is given before another holder of the same parts gets some: a reader of these
# parts opens an index for each writer. One block is read whole in any case.
_PORTION_BYTES = BLOCK_BYTES

# The boxes that a rank holds of a tensor: of each the offsets, then the sizes.
_Part = tuple[tuple[int, ...], ...]


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
        path = StatePath(name)
        for number, piece in enumerate(pieces_of(self.tensors[name])):
            yield part_name(name, number), FoundTensor(piece, path, name).leaf()


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
        self._release()
        return LocalState(
            key, tree, self.tensors, self.found, self._leaves, self.ties, first_rank_only
        )

    def _flat(self, value: FlatPart, path: StatePath, _: int) -> Any:
        found = self._examined(value.local, path)
        # A tie is the same object twice, which ranks with an empty part see too.
        return self._note(value, found, id(value))

    def _tensor(self, value: Tensor, path: StatePath, _: int) -> Any:
        found = self._examined(local_part(value), path)
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


@dataclass(frozen=True)
class Proposal:
    """What one rank could write of a component; sent to the first rank of its group.

    Tensors of one kind have one shape and are sharded alike. Ranks that shard tensors by a mesh
    have the same kinds, so that one of them says for all which tensors are of which kind.

    Args:
        parts: what it holds of each kind.
        kinds: for each name, in order, the number of its kind from 1; 0 where this rank has a tie.
            None where an earlier rank sends the same.
        kinds_digest: of these.
        signature: a digest of the names, types and whole shapes of all tensors.
    """

    parts: tuple[_Part, ...]
    kinds: bytes | None
    kinds_digest: str
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
        numbers: dict[object, int] = {}
        parts: list[_Part] = []
        kinds: dict[str, int] = {}
        for name, tensor in local.tensors.items():
            is_first_ranks = _is_first_ranks(local, name)
            shapes = (tensor.shape, local_part(tensor).shape)
            kind = (*shapes, sharding_of(tensor), is_first_ranks)
            if kind not in numbers:
                boxes = boxes_of(tensor, f"{local.key}: {name}")
                none = position and is_first_ranks
                parts.append(() if none else tuple((*b.offsets, *b.sizes) for b in boxes))
                numbers[kind] = len(parts)
            kinds[name] = numbers[kind]
        named = np.array([kinds.get(name, 0) for name in _names(local)], _NUMBER).tobytes()
        digest = xxhash.xxh3_128_hexdigest(named)
        return cls(tuple(parts), named, digest, _signature(local))

    def sent_by(self, position: int, digests: Sequence[str]) -> Proposal:
        """Without the kinds, where an earlier rank sends the same.

        Args:
            position: of this rank in its group.
            digests: ``kinds_digest`` of all ranks of the group.
        """
        is_sender = digests.index(self.kinds_digest) == position
        return self if is_sender else replace(self, kinds=None)


_NUMBER = np.dtype("<u4")


@dataclass(frozen=True)
class Choice:
    """Which of the holders of a part writes it; the same for all ranks of a group.

    Args:
        kinds: for each name, in order, the number of its kind among all ranks, from 1.
        rotations: for each name, in order, the number that selects the writers: of the holders of
            a part the one at this position, counted round.
    """

    kinds: bytes
    rotations: bytes


# By kind: the position of a rank among the holders of its part, and the number of these holders.
HolderPositions = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class SavePlan:
    """What the ranks of a group write of a component, as the first of them decides.

    Args:
        tensors: where the parts of each tensor are.
        choice: which holder of a part writes it.
        positions: of each rank among the holders of its parts.
    """

    tensors: dict[str, Logical]
    choice: Choice
    positions: tuple[HolderPositions, ...]


@dataclass(frozen=True)
class Assignment:
    """What a rank is to write of a component.

    Args:
        names: the tensors of which it writes its part.
        tensors: on the first rank, where the parts of each tensor are.
    """

    names: tuple[str, ...]
    tensors: dict[str, Logical] | None = None

    @classmethod
    def of(
        cls,
        local: LocalState,
        choice: Choice,
        positions: HolderPositions,
        tensors: dict[str, Logical] | None = None,
    ) -> Assignment:
        """What a rank is to write of the state that it holds.

        Args:
            local: the state as this rank holds it.
            choice: of the plan.
            positions: this rank's, of the plan.
            tensors: of the plan, on the first rank.
        """
        columns = [np.frombuffer(each, _NUMBER) for each in (choice.kinds, choice.rotations)]
        rows = zip(*(column.tolist() for column in columns), strict=True)
        chosen = dict(zip(_names(local), rows, strict=True))

        def writes(name: str) -> bool:
            kind, rotation = chosen[name]
            position, num_holders = positions.get(kind, (-1, 1))
            return bool(rotation % num_holders == position)

        return cls(tuple(filter(writes, local.tensors)), tensors)


def assign(
    local: LocalState, proposals: Sequence[Proposal], ranks: Sequence[int] | None = None
) -> SavePlan:
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
    names = _names(local)
    kinds = _kinds(local, proposals, ranks)
    rotations = _choose_writers(local, kinds, len(ranks))
    positions: tuple[HolderPositions, ...] = tuple({} for _ in ranks)
    numbers = {id(kind): n for n, kind in enumerate(dict.fromkeys(kinds.values()), start=1)}
    for kind in dict.fromkeys(kinds.values()):
        for holders in kind.holders:
            for number, holder in enumerate(holders):
                positions[holder][numbers[id(kind)]] = (number, len(holders))
    tensors = {
        name: Logical(
            local.found[name].element, tuple(tensor.shape), kinds[name].layout(rotations[name])
        )
        for name, tensor in local.tensors.items()
    }
    choice = Choice(
        np.array([numbers[id(kinds[n])] if n in kinds else 0 for n in names], _NUMBER).tobytes(),
        np.array([rotations.get(name, 0) for name in names], _NUMBER).tobytes(),
    )
    return SavePlan(tensors, choice, positions)


class _Kind:
    """Tensors of one shape that all ranks shard alike: which positions hold which part.

    Where ranks hold the same part, a rotation selects the writers of all parts at once: choosing a
    writer for each part of each tensor would balance a little better, but give every tensor a
    separate layout.

    Attributes:
        holders: the positions that hold each part.
        writers: for each rotation the positions that write, in the order of the boxes.
    """

    def __init__(self, parts: Mapping[_Part, list[int]], ranks: Sequence[int], ndim: int) -> None:
        self.holders = list(parts.values())
        rows = [(box, holders) for part, holders in parts.items() for box in part]
        table = np.array([box for box, _ in rows], np.int64).reshape(len(rows), 2 * ndim)
        order = np.lexsort(table.T[:ndim][::-1]) if ndim else np.arange(len(rows))
        self._boxes = table[order]
        self._num_elements = self._boxes[:, ndim:].prod(axis=1)
        counts = np.array([len(holders) for _, holders in rows], np.int64)
        begins = np.cumsum(counts) - counts
        flat = np.array([position for _, holders in rows for position in holders], np.int64)
        rotations = np.arange(max(counts, default=1))[:, None]
        self.writers = flat[begins[order] + rotations % counts[order]]
        self._ranks = np.array(ranks, np.int64)
        self._ndim = ndim
        self._layouts: dict[int, Layout] = {}

    def layout(self, rotation: int) -> Layout:
        """The parts with the rank that writes each at a rotation; one object for each."""
        if rotation not in self._layouts:
            boxes, writers = self._boxes, self._ranks[self.writers[rotation]]
            if not len(writers):
                self._layouts[rotation] = Layout.of_chunks([])
            else:
                self._layouts[rotation] = Layout(
                    writers, boxes[:, : self._ndim].copy(), boxes[:, self._ndim :].copy()
                )
        return self._layouts[rotation]

    def least_loaded(self, load: Column) -> int:
        """The first rotation whose writers have the fewest whole portions to write."""
        portions = load[self.writers] // _PORTION_BYTES
        return int(portions.max(axis=1).argmin()) if len(self.writers) > 1 else 0

    def add_to(self, load: Column, rotation: int, element_bytes: int) -> None:
        """Adds what each position writes at a rotation, in bytes."""
        np.add.at(load, self.writers[rotation], self._num_elements * element_bytes)


def _kinds(
    local: LocalState, proposals: Sequence[Proposal], ranks: Sequence[int]
) -> dict[str, _Kind]:
    """The kind of each tensor; one object for all that are sharded alike on all ranks."""
    sent = {each.kinds_digest: each.kinds for each in proposals if each.kinds is not None}
    numbers = {digest: number for number, digest in enumerate(sent)}
    table = np.array([np.frombuffer(kinds, _NUMBER) for kinds in sent.values()])
    sent_by = np.array([numbers[each.kinds_digest] for each in proposals])
    known: dict[bytes, _Kind] = {}
    found: dict[str, _Kind] = {}
    for column, name in enumerate(_names(local)):
        alike = table[:, column].tobytes()
        tensor = local.tensors.get(name)
        if tensor is not None and alike in known:
            found[name] = known[alike]
            continue
        parts: dict[_Part, list[int]] = {}
        numbers_here = table[sent_by, column].tolist()
        for position, (number, proposal) in enumerate(zip(numbers_here, proposals, strict=True)):
            part = proposal.parts[number - 1] if number else ()
            if part:
                parts.setdefault(part, []).append(position)
        if tensor is None:
            if parts:
                raise _not_tied(local, name, ranks[min(map(min, parts.values()))])
            continue
        kind = found[name] = known[alike] = _Kind(parts, ranks, len(tensor.shape))
        problem = kind.layout(0).tiling_problem(tuple(tensor.shape))
        if problem is not None:
            raise UnsupportedValueError(f"{local.key}: {name}", found=problem)
    return found


def _choose_writers(
    local: LocalState, kinds: Mapping[str, _Kind], num_ranks: int
) -> dict[str, int]:
    """The rotation of each tensor with which all ranks write about as much, to a portion."""
    load = np.zeros(num_ranks, np.int64)
    rotations: dict[str, int] = {}

    def order(name: str) -> tuple[bool, int]:
        # First those without a choice, then the large ones.
        num_bytes = math.prod(local.tensors[name].shape) * local.found[name].element.num_bytes
        return len(kinds[name].writers) > 1, -num_bytes

    for name in sorted(local.tensors, key=order):
        rotations[name] = kinds[name].least_loaded(load)
        kinds[name].add_to(load, rotations[name], local.found[name].element.num_bytes)
    return rotations


def _names(local: LocalState) -> list[str]:
    """All names in order, ties among them: the same on all ranks of a group."""
    return sorted({*local.tensors, *local.ties})


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
