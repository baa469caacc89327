"""Requests of the ranks (a signal to leave, a timer), all-reduced; ``StepBoundary`` decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from resumekit.distributed import World
from resumekit.errors import RankDisagreementError


class Requests(NamedTuple):
    """What a rank requests; of several ranks' the largest value counts.

    Args:
        leave: the number of a signal that asks the run to leave; 0 when there was none.
        save: 1 when a clock says that a save is due, else 0.
        busy: 1 while a save is being written in the background, else 0.
        failed: 1 when a save in the background has failed, else 0.
    """

    leave: int = 0
    save: int = 0
    busy: int = 0
    failed: int = 0


NOTHING = Requests()


class RequestExchange:
    """Overlapped all-reduce of the ranks' requests; it also checks that they are at one step.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._is_alone = world.world_size == 1
        self._own_requests = NOTHING  # that a rank alone has sent last
        self._step = 0  # that this rank was at when it last spoke
        self._under_way: Callable[[], list[int]] | None = None

    def receive(self, requests: Requests) -> Requests:
        """The all-reduced requests of the boundary before; in a world of one, its own.

        Raises:
            RankLostError: another rank does not answer.
            RankDisagreementError: another rank was at another step there.
        """
        if self._is_alone:
            return requests
        common = self.wait()
        self._under_way = None
        return common

    def send(self, requests: Requests, step: int) -> None:
        """Sends the requests of this rank, which are received at the next boundary. Collective.

        Args:
            requests: of this rank.
            step: the optimizer step that it has done.
        """
        if self._is_alone:
            self._own_requests = requests
        else:
            self._step = step
            self._under_way = self._world.start_max((*requests, step, -step))

    def wait(self) -> Requests:
        """Waits for the all-reduce in progress, and gives what ``receive`` will give.

        That is what was sent last, so it holds for this step boundary. None under way: no requests.

        Raises:
            RankLostError: another rank does not answer.
            RankDisagreementError: another rank is at another step.
        """
        if self._under_way is None:
            return self._own_requests
        *common, highest, negated = self._under_way()
        if highest != -negated:
            raise RankDisagreementError(
                "step()",
                found=f"rank {self._world.rank} has done {self._step} steps (all ranks: "
                f"{-negated} to {highest})",
                expected="the same number on all ranks",
                remedy="Call step() once for each optimizer step, on every rank",
            )
        return Requests(*common)
