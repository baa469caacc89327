"""The ranks of one job: who this process is, and how the ranks agree. No-ops in one process.

Agreement runs on a private gloo group, so it works beside any training backend and never
interleaves with the training's own collectives. Objects travel between the ranks by torch's object
collectives; nothing of a checkpoint passes through them unverified.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from resumekit.errors import (
    ConfigurationError,
    RankDisagreementError,
    RankFailedError,
    RankLostError,
    ResumekitError,
)
from resumekit.layout import Layout

T = TypeVar("T")
U = TypeVar("U")

AGREEMENT_TIMEOUT_SECONDS = 600


@dataclass(frozen=True)
class _Outcome:
    """What one rank's action came to: a value, or an error that can travel."""

    value: Any = None
    error: ResumekitError | None = None


class World:
    """The ranks of the job as one process sees them."""

    def __init__(self, layout: Layout, group: Any = None) -> None:
        self.layout = layout
        self._group = group

    @classmethod
    def current(cls, *, timeout_seconds: float = AGREEMENT_TIMEOUT_SECONDS) -> World:
        """The job of the initialised default process group, or a world of one. Collective.

        Args:
            timeout_seconds: after which a rank that waits for the others gives up.

        Raises:
            ConfigurationError: the launcher announces several ranks and nobody has called
                ``init_process_group`` yet.
        """
        if not (dist.is_available() and dist.is_initialized()):
            announced = int(os.environ.get("WORLD_SIZE", "1"))
            if announced > 1:
                raise ConfigurationError(
                    "torch.distributed",
                    found=f"not initialised, while WORLD_SIZE={announced}",
                    expected="one process group over all ranks",
                    remedy="Call init_process_group before the Checkpointer is made",
                )
            return cls(Layout())
        rank, world_size = dist.get_rank(), dist.get_world_size()
        layout = Layout(
            rank,
            world_size,
            int(os.environ.get("LOCAL_RANK", rank)),
            int(os.environ.get("GROUP_RANK", 0)),
        )
        if world_size == 1:
            return cls(layout)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        return cls(layout, group)

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.layout.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the job."""
        return self.layout.world_size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.layout.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order. Collective.

        Raises:
            RankLostError: a rank has died, or does not answer.
        """
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _others_answer():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value. Collective.

        Raises:
            RankLostError: a rank has died, or does not answer.
        """
        if self.world_size == 1:
            return value
        values = [value]
        with _others_answer():
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begins to find the largest of each value among all ranks, beside what follows.

        Collective.

        Returns:
            Waits for the result and gives it.
        """
        largest = torch.tensor(values)
        with _others_answer():
            work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None  # this rank is in the group

        def result() -> list[int]:
            with _others_answer():
                work.wait()
            return [int(value) for value in largest]

        return result

    def everywhere(self, action: Callable[[], T]) -> list[T]:
        """Runs the action on every rank and gives all results. Collective.

        Raises:
            ResumekitError: on every rank, when the action failed on any; it names the rank.
        """
        if self.world_size == 1:
            return [action()]
        outcome = self._attempt(action)
        outcomes = self.gather(outcome)
        for rank, each in enumerate(outcomes):
            if each.error is not None:
                raise outcome.error or from_rank(rank, each.error)
        return [each.value for each in outcomes]

    def on_first(self, action: Callable[[], T]) -> T:
        """Runs the action on rank 0 alone and gives its result to all. Collective.

        Raises:
            ResumekitError: on every rank, when the action failed on rank 0.
        """
        if self.world_size == 1:
            return action()
        outcome = self.broadcast(self._attempt(action) if self.is_first else _Outcome())
        if outcome.error is not None:
            raise outcome.error if self.is_first else from_rank(0, outcome.error)
        return outcome.value  # type: ignore[no-any-return]

    def exchange(self, value: T, make: Callable[[list[T]], list[U]]) -> U:
        """What rank 0 makes of the values of all ranks for this one. Collective.

        Args:
            value: of this rank; it travels to rank 0 alone.
            make: gives from the values in rank order one for each rank; runs on rank 0.

        Raises:
            ResumekitError: on every rank, when ``make`` failed.
        """
        if self.world_size == 1:
            return make([value])[0]
        values: list[Any] | None = [None] * self.world_size if self.is_first else None
        with _others_answer():
            dist.gather_object(value, values, dst=0, group=self._group)
        made: list[Any] = [None] * self.world_size
        if values is not None:
            given = values
            outcome = self._attempt(lambda: make(given))
            made = [_Outcome(error=outcome.error)] * self.world_size
            if outcome.error is None:
                made = [_Outcome(value=each) for each in outcome.value]
        mine: list[Any] = [None]
        with _others_answer():
            given_out = made if self.is_first else None
            dist.scatter_object_list(mine, given_out, src=0, group=self._group)
        if mine[0].error is not None:
            raise mine[0].error if self.is_first else from_rank(0, mine[0].error)
        return mine[0].value  # type: ignore[no-any-return]

    def require_equal(self, what: str, values: Mapping[str, Any]) -> None:
        """Returns when all ranks give the same values. Collective.

        Args:
            what: what they are, for the error.
            values: by name; plain, and the same keys may be missing on some ranks.

        Raises:
            RankDisagreementError: on every rank, naming the first value that differs and who said
                what.
        """
        every = self.gather(dict(values))
        for name in sorted({name for each in every for name in each}):
            said = [repr(each[name]) if name in each else "nothing" for each in every]
            if len(set(said)) > 1:
                raise RankDisagreementError(
                    f"{what} {name}",
                    found=who_said(said),
                    expected="the same on all ranks",
                    remedy="Give every rank the same arguments",
                )

    def _attempt(self, action: Callable[[], Any]) -> _Outcome:
        # Whatever fails here must reach the other ranks, or they wait for this one for ever.
        try:
            return _Outcome(value=action())
        except ResumekitError as error:
            return _Outcome(error=error)
        except Exception as error:  # noqa: BLE001
            wrapped = RankFailedError(f"rank {self.rank}", found=f"{type(error).__name__}: {error}")
            wrapped.__cause__ = error
            return _Outcome(error=wrapped)


def who_said(said: Sequence[str]) -> str:
    """Each value that was given, once, with the ranks that gave it."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(said):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(who)}: {value}"
        for value, who in ranks.items()
    )


@contextmanager
def _others_answer() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo's word for a closed connection and for a timeout
        raise RankLostError(
            "the ranks",
            found=f"one of them does not answer ({str(error).strip().splitlines()[-1]})",
            expected="all of them at the same place",
            remedy="Start the job again: it continues from its newest checkpoint",
        ) from error


def from_rank(rank: int, error: ResumekitError) -> ResumekitError:
    """An error of another rank, told as such."""
    return type(error)(
        f"rank {rank}: {error.where}",
        found=error.found,
        expected=error.expected,
        remedy=error.remedy,
    )
