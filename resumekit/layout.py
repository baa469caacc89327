"""The ranks of a job: where each stands, which hold one state, and a change of their number.

Standard library only, like the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resumekit.state import SharingPattern

# Disjoint groups of ranks, each in ascending order, in the order of their first ranks.
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Layout:
    """Where this process stands in the job."""

    rank: int = 0
    world_size: int = 1
    node: str = ""  # names this process's host among those of the job


@dataclass(frozen=True)
class Shares:
    """Which ranks take the same data, as the ranks of one tensor-parallel group or pipeline do.

    Args:
        of_ranks: the share of each rank, in rank order; shares are numbered from 0.
    """

    of_ranks: tuple[int, ...]

    @classmethod
    def one_each(cls, world_size: int) -> Shares:
        """Every rank takes data of its own."""
        return cls(tuple(range(world_size)))

    @property
    def number(self) -> int:
        """How many there are."""
        return max(self.of_ranks) + 1

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each share."""
        return tuple(map(self.of_ranks.index, range(self.number)))


@dataclass(frozen=True)
class WorldChange:
    """A checkpoint of one number of ranks is taken up by another number of them.

    Ranks that take the same data count as one; so do the ranks of a group that has one state.

    Args:
        rank: this rank.
        world_size: the ranks now.
        former_world_size: the ranks that wrote the checkpoint.
    """

    rank: int
    world_size: int
    former_world_size: int

    @property
    def is_new(self) -> bool:
        """Whether the checkpoint has no state of this very rank."""
        return self.rank >= self.former_world_size

    @property
    def model_rank(self) -> int:
        """The former rank that this one is made after: itself, where it existed."""
        return self.rank % self.former_world_size

    @property
    def inherited(self) -> tuple[int, ...]:
        """The former ranks of which this rank alone takes care; each is in one rank's care."""
        return tuple(range(self.rank, self.former_world_size, self.world_size))

    @property
    def readable(self) -> tuple[int, ...]:
        """The former ranks whose states this rank reads."""
        two = range(min(2, self.former_world_size))  # two tell whether the ranks were alike
        return tuple(sorted({*two, self.model_rank, *self.inherited}))


def groups_of(
    pattern: SharingPattern, world: Sequence[Layout], declared: Sequence[Sequence[int]]
) -> Groups:
    """The ranks that hold one state of a component together, group by group.

    Args:
        pattern: the component's sharing pattern.
        world: the layout of every rank, in rank order.
        declared: for each rank the ranks of its process group; none where it was given none.
    """
    ranks = range(len(world))
    if any(declared):
        return tuple(sorted({tuple(sorted(group)) for group in declared}))
    if pattern is SharingPattern.PER_RANK:
        return tuple((rank,) for rank in ranks)
    if pattern is SharingPattern.PER_NODE:
        nodes: dict[str, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(world[rank].node, []).append(rank)
        return tuple(map(tuple, nodes.values()))
    return (tuple(ranks),)
