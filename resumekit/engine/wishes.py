"""What one rank alone knows, made common among the ranks without anybody waiting for it.

A signal reaches one rank, a clock runs a little faster on another. If either acted alone, the ranks
would part. So each says at a step boundary what it wishes, in an all-reduce that runs beside the
next step, and all of them act on the result at the boundary after that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from resumekit.distributed import World


class Wishes(NamedTuple):
    """What is wished for; of several ranks' the largest counts.

    Args:
        leave: the number of a signal that asks the run to leave; 0 when there was none.
        save: 1 when a clock says that a save is due, else 0.
    """

    leave: int = 0
    save: int = 0


class WishRound:
    """The rounds in which the ranks exchange their wishes.

    Args:
        world: the ranks; in one process there is nobody to wait for.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._under_way: Any = None

    def hear(self, own: Wishes) -> Wishes:
        """The wishes that are common now: those of the boundary before, or, alone, one's own.

        Raises:
            RankLostError: another rank does not answer.
        """
        if self._world.world_size == 1:
            return own
        under_way, self._under_way = self._under_way, None
        return Wishes() if under_way is None else Wishes(*under_way())

    def say(self, own: Wishes) -> None:
        """Sends what this rank wishes; it is heard at the next boundary. Collective."""
        if self._world.world_size > 1:
            self._under_way = self._world.start_max(own)

    def end(self) -> None:
        """Waits for the round that is under way; nobody will act on it."""
        self.hear(Wishes())
