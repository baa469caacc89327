"""What a component learns of the ranks when their number has changed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorldChange:
    """A checkpoint is resumed on another number of ranks.

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
        """The former rank whose state this rank starts from: its own, where it existed."""
        return self.rank % self.former_world_size

    @property
    def inherited(self) -> tuple[int, ...]:
        """The former ranks whose state this rank reshards; each belongs to exactly one new rank."""
        return tuple(range(self.rank, self.former_world_size, self.world_size))

    @property
    def readable(self) -> tuple[int, ...]:
        """The former ranks whose states this rank reads."""
        two = range(min(2, self.former_world_size))  # two show whether the ranks were alike
        return tuple(sorted({*two, self.model_rank, *self.inherited}))
