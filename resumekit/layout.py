"""The ranks of a job: where each stands, which of them write, and a change of their number.

Standard library only, like the contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resumekit.contract import SharingPattern
from resumekit.errors import DeclarationError


@dataclass(frozen=True)
class Layout:
    """Where this process stands in the job."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    group_rank: int = 0  # the index of this process's host


@dataclass(frozen=True)
class WorldChange:
    """A checkpoint of one number of ranks is taken up by another number of them.

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


def writer_ranks(
    pattern: SharingPattern, world: Sequence[Layout], group_ranks: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The ranks that write a component of this pattern.

    Args:
        pattern: the component's sharing pattern.
        world: the layout of every rank, in rank order.
        group_ranks: for PER_GROUP, the global ranks of the group in question.
    """
    if pattern in (SharingPattern.GLOBAL, SharingPattern.REPLICATED):
        return (0,)
    if pattern in (SharingPattern.PER_RANK, SharingPattern.SHARDED):
        return tuple(layout.rank for layout in world)
    if pattern is SharingPattern.PER_NODE:
        return tuple(layout.rank for layout in world if layout.local_rank == 0)
    if not group_ranks:
        raise DeclarationError("per_group", found="a group without ranks")
    return (min(group_ranks),)
