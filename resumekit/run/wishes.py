"""What one rank alone knows, made common among the ranks without anybody waiting for it.

A signal reaches one rank, a clock runs a little faster on another. If either acted alone, the ranks
would part. So each says at a step boundary what it wishes, in an all-reduce that runs beside the
next step, and all of them act on the result at the boundary after that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from resumekit.distributed import World
from resumekit.errors import RankDisagreementError


class Wishes(NamedTuple):
    """What is wished for; of several ranks' the largest counts.

    Args:
        leave: the number of a signal that asks the run to leave; 0 when there was none.
        save: 1 when a clock says that a save is due, else 0.
    """

    leave: int = 0
    save: int = 0


class WishRound:
    """The rounds in which the ranks exchange their wishes, and see that they are at one step.

    Args:
        world: the ranks; in one process there is nobody to wait for.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._step = 0  # that this rank was at when it last spoke
        self._under_way: Callable[[], list[int]] | None = None

    def hear(self, own: Wishes) -> Wishes:
        """The wishes that are common now: those of the boundary before, or, alone, one's own.

        Raises:
            RankLostError: another rank does not answer.
            RankDisagreementError: another rank was at another step there.
        """
        if self._world.world_size == 1:
            return own
        common = self.wait()
        self._under_way = None
        return common

    def say(self, own: Wishes, step: int) -> None:
        """Sends what this rank wishes; it is heard at the next boundary. Collective.

        Args:
            own: its wishes.
            step: the optimizer step that it has done.
        """
        if self._world.world_size > 1:
            self._step = step
            self._under_way = self._world.start_max((*own, step, -step))

    def wait(self) -> Wishes:
        """Waits for the round that is under way, which is heard later.

        Raises:
            RankLostError: another rank does not answer.
            RankDisagreementError: another rank is at another step.
        """
        if self._under_way is None:
            return Wishes()
        leave, save, highest, negated = self._under_way()
        if highest != -negated:
            raise RankDisagreementError(
                "step()",
                found=f"rank {self._world.rank} has done {self._step} steps, the ranks together "
                f"from {-negated} to {highest}",
                expected="as many on all ranks",
                remedy="Call step() once for each optimizer step, on every rank",
            )
        return Wishes(leave, save)
