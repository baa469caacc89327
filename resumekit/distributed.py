"""The ranks of one job: their groups, and how they agree. No-ops in one process.

Agreement runs on a private gloo group, so it works beside any training backend and never
interleaves with the training's own collectives. Objects travel between the ranks by torch's object
collectives; nothing of a checkpoint passes through them unverified.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from resumekit.state import SharingPattern

T = TypeVar("T")
U = TypeVar("U")

AGREEMENT_TIMEOUT_SECONDS = 600

# Disjoint groups of ranks, each in ascending order, in the order of their first ranks.
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class DataRanks:
    """Which ranks take the same data, as the ranks of one tensor-parallel group or pipeline do.

    Args:
        of_ranks: the data-parallel rank of each rank, in rank order.
    """

    of_ranks: tuple[int, ...]

    @classmethod
    def one_each(cls, world_size: int) -> DataRanks:
        """Every rank takes data of its own."""
        return cls(tuple(range(world_size)))

    @property
    def number(self) -> int:
        """How many there are."""
        return max(self.of_ranks) + 1

    @property
    def first_ranks(self) -> tuple[int, ...]:
        """The first rank of each data-parallel rank."""
        return tuple(map(self.of_ranks.index, range(self.number)))


def groups_of(
    pattern: SharingPattern, nodes: Sequence[str], declared: Sequence[Sequence[int]]
) -> Groups:
    """The ranks that hold one state of a component together, group by group.

    Args:
        pattern: the component's sharing pattern.
        nodes: the node of every rank, in rank order.
        declared: for each rank the ranks of its process group; none where it was given none.
    """
    ranks = range(len(nodes))
    if any(declared):
        return tuple(sorted({tuple(sorted(group)) for group in declared}))
    if pattern is SharingPattern.PER_RANK:
        return tuple((rank,) for rank in ranks)
    if pattern is SharingPattern.PER_NODE:
        of_node: dict[str, list[int]] = {}
        for rank in ranks:
            of_node.setdefault(nodes[rank], []).append(rank)
        return tuple(map(tuple, of_node.values()))
    return (tuple(ranks),)


@dataclass(frozen=True)
class _Outcome:
    """What one rank's action came to: a value, or an error that can travel."""

    value: Any = None
    error: ResumekitError | None = None


@dataclass(frozen=True)
class World:
    """The ranks of the job, or of a group of them, as one process sees them.

    Args:
        rank: the global rank of this process.
        node: names this process's host among those of the job.
        ranks: the global ranks.
        group: their gloo group; None for one rank.
        timeout_seconds: after which a rank that waits for the others gives up.
    """

    rank: int = 0
    node: str = ""
    ranks: tuple[int, ...] = (0,)
    group: Any = None
    timeout_seconds: float = AGREEMENT_TIMEOUT_SECONDS

    @classmethod
    def current(cls, *, timeout_seconds: float = AGREEMENT_TIMEOUT_SECONDS) -> World:
        """The job of the initialised default process group, or a world of one. Collective.

        Args:
            timeout_seconds: after which a rank that waits for the others gives up.

        Raises:
            ConfigurationError: the launcher announces several ranks and nobody has called
                ``init_process_group`` yet, or gloo cannot connect the ranks.
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
            return cls()
        rank, world_size = dist.get_rank(), dist.get_world_size()
        # torchrun numbers the nodes; other launchers leave them to their names.
        node = os.environ.get("GROUP_RANK") or socket.gethostname()
        world = cls(rank, node, (rank,), timeout_seconds=timeout_seconds)
        return world.within((tuple(range(world_size)),))

    def within(self, groups: Groups) -> World:
        """The ranks of this rank's group. Collective over all ranks of the job.

        Args:
            groups: the same on all ranks; every rank is in one of them.

        Raises:
            ConfigurationError: gloo cannot connect the ranks.
        """
        mine = self
        for ranks in groups:
            group = None
            if len(ranks) > 1:
                group = _gloo_group(ranks, self.timeout_seconds)
            if self.rank in ranks:
                mine = replace(self, group=group, ranks=ranks)
        return mine

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, rank 0 in the job."""
        return self.rank == self.ranks[0]

    def is_alive(self) -> bool:
        """Whether collectives still work: the process group exists, or there is one rank."""
        return self.world_size == 1 or dist.is_initialized()

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in rank order. Collective.

        Raises:
            RankLostError: a rank has died, or does not answer.
        """
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _others_answer():
            dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """The first rank's value. Collective.

        Raises:
            RankLostError: a rank has died, or does not answer.
        """
        if self.world_size == 1:
            return value
        values = [value]
        with _others_answer():
            dist.broadcast_object_list(values, src=self.ranks[0], group=self.group)
        return values[0]

    def start_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Starts an all-reduce of the maximum of each value, and does not wait for it.

        Collective.

        Returns:
            Waits for the result and gives it.
        """
        largest = torch.tensor(values)
        with _others_answer():
            work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group, async_op=True)
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
        for rank, each in zip(self.ranks, outcomes, strict=True):
            if each.error is not None:  # of the same class on all ranks
                raise each.error if rank == self.rank else from_rank(rank, each.error)
        return [each.value for each in outcomes]

    def on_first(self, action: Callable[[], T]) -> T:
        """Runs the action on the first rank alone and gives its result to all. Collective.

        Raises:
            ResumekitError: on every rank, when the action failed.
        """
        if self.world_size == 1:
            return action()
        outcome = self.broadcast(self._attempt(action) if self.is_first else _Outcome())
        return self._result(outcome)  # type: ignore[no-any-return]

    def exchange(self, value: T, make: Callable[[list[T]], list[U]]) -> U:
        """What the first rank makes of the values of all ranks for this one. Collective.

        Args:
            value: of this rank; it travels to the first rank alone.
            make: gives from the values in rank order one for each rank; runs on the first rank.

        Raises:
            ResumekitError: on every rank, when ``make`` failed.
        """
        if self.world_size == 1:
            return make([value])[0]
        values: list[Any] = [None] * self.world_size
        made: list[_Outcome] | None = None
        with _others_answer():
            first_has = values if self.is_first else None
            dist.gather_object(value, first_has, dst=self.ranks[0], group=self.group)
        if self.is_first:
            outcome = self._attempt(lambda: make(values))
            failed = outcome.error is not None
            made = [outcome] * len(values) if failed else list(map(_Outcome, outcome.value))
        mine: list[Any] = [None]
        with _others_answer():
            dist.scatter_object_list(mine, made, src=self.ranks[0], group=self.group)
        return self._result(mine[0])  # type: ignore[no-any-return]

    def _result(self, outcome: _Outcome) -> Any:
        """What an action of the first rank gave; raises its error."""
        if outcome.error is not None:
            raise outcome.error if self.is_first else from_rank(self.ranks[0], outcome.error)
        return outcome.value

    def require_equal(
        self,
        what: str,
        values: Mapping[str, Any],
        *,
        remedy: str = "Give every rank the same arguments",
    ) -> None:
        """Raises RankDisagreementError unless all ranks give the same values. Collective.

        Args:
            what: what they are, for the error.
            values: by name; plain, and the same keys may be missing on some ranks.
            remedy: what to do about it, for the error.

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
                    remedy=remedy,
                )

    def _attempt(self, action: Callable[[], Any]) -> _Outcome:
        try:
            return _Outcome(value=action())
        except Exception as error:  # noqa: BLE001 - the other ranks would wait for this one
            return _Outcome(error=as_error(self.rank, error))


def require_all_ranks(what: str, num_processes: int, *, remedy: str) -> None:
    """Raises ConfigurationError unless a framework trains with all ranks of the job.

    A framework that does not see the other ranks trains on all data in each of them, without an
    all-reduce of gradients, and all of them save into one run directory.

    Args:
        what: the framework's object, for the error.
        num_processes: with which it trains.
        remedy: how it sees the other ranks.

    Raises:
        ConfigurationError: the job has more ranks.
    """
    is_group = dist.is_available() and dist.is_initialized()
    ranks = dist.get_world_size() if is_group else int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes < ranks:
        raise ConfigurationError(
            what,
            found=f"it trains with {num_processes} of {ranks} ranks, so each would use all data",
            expected="one training on all ranks",
            remedy=remedy,
        )


def restart_risk(world_size: int) -> str | None:
    """Why torchrun may fail to restart this job, and what to set; None where nothing is known.

    Args:
        world_size: of the job.
    """
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    # torch 2.13 distributed/elastic/rendezvous/dynamic_rendezvous.py keeps one store for all
    # attempts, and elastic/agent/server/local_elastic_agent.py sets this variable for the ranks.
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world_size == 1 or not (restarts and shared):
        return None
    return (
        "torchrun may not restart this job: gloo finds addresses of dead ranks. "
        "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )


def ranks_of(group: Any) -> list[int] | None:
    """The global ranks of a torch group, a one-dimensional DeviceMesh or a list of ranks."""
    if hasattr(group, "get_group"):
        group = group.get_group()
    if isinstance(group, dist.ProcessGroup):
        return list(dist.get_process_group_ranks(group))
    is_list = isinstance(group, Sequence) and all(type(rank) is int for rank in group)
    return list(group) if is_list else None


def who_said(said: Sequence[str] | Mapping[int, str]) -> str:
    """Each value that was given, once, with the ranks that gave it."""
    ranks: dict[str, list[str]] = {}
    for rank, value in said.items() if isinstance(said, Mapping) else enumerate(said):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(who)}: {value}"
        for value, who in ranks.items()
    )


def _gloo_group(ranks: Sequence[int], timeout_seconds: float) -> Any:
    """A new gloo group. Collective over all ranks of the job.

    Raises:
        ConfigurationError: torch was built without gloo, or gloo cannot connect the ranks.
    """
    try:
        return dist.new_group(
            list(ranks), backend="gloo", timeout=timedelta(seconds=timeout_seconds)
        )
    except RuntimeError as error:  # of the build, of the name of an interface, of a connection
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
        raise ConfigurationError(
            "torch.distributed",
            found=f"no gloo group with GLOO_SOCKET_IFNAME={interface!r} "
            f"({str(error).strip().splitlines()[-1]})",
            expected="gloo on all ranks, beside the backend of the training",
            remedy="Set GLOO_SOCKET_IFNAME to the network interface between the nodes, "
            "as NCCL_SOCKET_IFNAME",
        ) from error


@contextmanager
def _others_answer() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo's word for a closed connection and for a timeout
        raise RankLostError(
            "the ranks",
            found=f"one of them does not answer ({str(error).strip().splitlines()[-1]})",
            expected="all of them at the same point",
            remedy="Start the job again: it continues from its newest checkpoint",
        ) from error


def as_error(rank: int, error: Exception) -> ResumekitError:
    """An error of this rank in a form that can travel to the others.

    Args:
        rank: this rank.
        error: any.
    """
    if isinstance(error, ResumekitError):
        return error
    wrapped = RankFailedError(f"rank {rank}", found=f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def from_rank(rank: int, error: ResumekitError) -> ResumekitError:
    """An error of another rank, marked as such; an error that names a rank already stays."""
    if error.where.startswith("rank "):
        return error
    return type(error)(
        f"rank {rank}: {error.where}",
        found=error.found,
        expected=error.expected,
        remedy=error.remedy,
    )
