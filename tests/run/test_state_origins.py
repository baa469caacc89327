"""Which saved per-rank state each rank loads, where several ranks take the same data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resumekit.distributed import DataRanks
from resumekit.errors import StateMismatchError
from resumekit.run.agreement import ComponentGroups
from resumekit.run.options import Options
from resumekit.run.resuming.state_origins import StateOrigins
from resumekit.state import SharingPattern, WorldChange
from resumekit.storage.manifest import ComponentRecord

PAIRS = (0, 0, 1, 1)  # two ranks of a tensor-parallel group take the same data
IN_TURN = (0, 1, 0, 1)


def origins(
    rank: int, of_ranks: tuple[int, ...], *, may_change: bool = True, per_rank: str = ""
) -> StateOrigins:
    world: Any = SimpleNamespace(rank=rank, world_size=len(of_ranks))
    groups, names = ComponentGroups(rank, {}), {per_rank} - {""}
    allowed: set[Any] = {"world_size"} if may_change else set()
    options = Options(allow_changes=allowed, per_rank=names)
    return StateOrigins(world, DataRanks(of_ranks), groups, options)


def saved(*of_ranks: int, per_rank: str = "") -> Any:
    details: dict[str, Any] = {"per_rank": [per_rank]} if per_rank else {}
    if of_ranks != tuple(range(len(of_ranks))):
        details["shares"] = list(of_ranks)
    return SimpleNamespace(step=1, world_size=len(of_ranks), details=details)


def record(pattern: SharingPattern = SharingPattern.PER_RANK) -> ComponentRecord:
    return ComponentRecord("rng", pattern.value, "exact", "", "state", (0,))


@pytest.mark.parametrize("rank", range(4))
def test_in_the_same_job_each_rank_loads_its_own_state(rank: int) -> None:
    found = origins(rank, PAIRS).of(record(), saved(*PAIRS))
    assert (found.own_number, found.writers) == (rank, (0, 1, 2, 3))


@pytest.mark.parametrize(("rank", "number"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_ranks_that_take_the_same_data_load_one_state(rank: int, number: int) -> None:
    """The same number of ranks, in other groups: what counts is the part of the data."""
    found = origins(rank, IN_TURN).of(record(), saved(*PAIRS))
    assert (found.own_number, found.writers) == (number, (0, 2))


def test_with_another_number_of_parts_states_are_resharded() -> None:
    found = origins(3, PAIRS).of(record(), saved(0, 1, 2))
    assert found.own_number is None
    assert found.change == WorldChange(1, 2, 3)
    assert found.readable == (0, 1)
    with pytest.raises(StateMismatchError, match="allow_changes"):
        origins(3, PAIRS, may_change=False).of(record(), saved(0, 1, 2))


def test_one_state_of_a_job_is_everybodys() -> None:
    found = origins(3, PAIRS).of(record(SharingPattern.REPLICATED), saved(0))
    assert found.own_number == 0


@pytest.mark.parametrize("rank", range(4))
def test_with_the_option_each_rank_loads_its_own_state_whatever_data_it_takes(rank: int) -> None:
    now = origins(rank, IN_TURN, per_rank="rng")
    found = now.of(record(), saved(*PAIRS, per_rank="rng"))
    assert (found.own_number, found.writers) == (rank, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("now", "named_now", "then", "named_then"),
    [
        ((0, 1), "rng", PAIRS, "rng"),  # as many parts of the data, but not as many states
        ((0,), "rng", (0, 1), "rng"),
        ((0,), "", (0, 0), "rng"),
        ((0, 1), "", (0, 1), "rng"),
        ((0, 1), "rng", (0,), ""),
        ((0, 1), "rng", (0, 1, 2), ""),
    ],
)
def test_a_rank_that_would_lack_its_own_state_is_refused(
    now: tuple[int, ...], named_now: str, then: tuple[int, ...], named_then: str
) -> None:
    pattern = SharingPattern.PER_RANK if named_then else SharingPattern.REPLICATED
    with pytest.raises(StateMismatchError, match=r"rng: a job of . ranks with .*exclude=.'rng'."):
        origins(0, now, per_rank=named_now).of(record(pattern), saved(*then, per_rank=named_then))


@pytest.mark.parametrize("now", [(0,), (0, 1)])
def test_the_one_state_of_equal_ranks_is_each_ranks_own(now: tuple[int, ...]) -> None:
    found = origins(0, now, per_rank="rng").of(record(SharingPattern.REPLICATED), saved(0, 1))
    assert found.own_number == 0
