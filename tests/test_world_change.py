"""Which saved per-rank state each rank loads, where several ranks take the same data."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from resumekit.distributed import DataRanks
from resumekit.errors import StateMismatchError
from resumekit.run.agreement import ComponentGroups
from resumekit.run.world_change import StateOrigins
from resumekit.state import SharingPattern
from resumekit.storage import ComponentRecord

PAIRS = (0, 0, 1, 1)  # two ranks of a tensor-parallel group take the same data
IN_TURN = (0, 1, 0, 1)


def origins(rank: int, of_ranks: tuple[int, ...], *, may_change: bool = True) -> StateOrigins:
    world: Any = SimpleNamespace(rank=rank, world_size=len(of_ranks))
    return StateOrigins(
        world, DataRanks(of_ranks), ComponentGroups(rank, {}), may_change=may_change
    )


def saved(*of_ranks: int) -> Any:
    details = {} if of_ranks == tuple(range(len(of_ranks))) else {"shares": list(of_ranks)}
    return SimpleNamespace(step=1, world_size=len(of_ranks), details=details)


def record(pattern: SharingPattern = SharingPattern.PER_RANK) -> ComponentRecord:
    return ComponentRecord("rng", pattern.value, "exact", "", "state", (0,))


@pytest.mark.parametrize("rank", range(4))
def test_in_the_same_job_each_rank_loads_its_own_state(rank: int) -> None:
    found = origins(rank, PAIRS)
    assert found.own_number(record(), saved(*PAIRS)) == rank
    assert found.writers(record(), saved(*PAIRS)) == (0, 1, 2, 3)


@pytest.mark.parametrize(("rank", "number"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_ranks_that_take_the_same_data_load_one_state(rank: int, number: int) -> None:
    """The same number of ranks, in other groups: what counts is the part of the data."""
    found = origins(rank, IN_TURN)
    assert found.own_number(record(), saved(*PAIRS)) == number
    assert found.writers(record(), saved(*PAIRS)) == (0, 2)


def test_with_another_number_of_parts_states_are_resharded() -> None:
    found = origins(3, PAIRS)
    assert found.own_number(record(), saved(0, 1, 2)) is None
    change = found.change(record(), saved(0, 1, 2))
    assert (change.rank, change.world_size, change.former_world_size) == (1, 2, 3)
    assert found.readable(record(), saved(0, 1, 2)) == (0, 1)
    with pytest.raises(StateMismatchError, match="allow_changes"):
        origins(3, PAIRS, may_change=False).own_number(record(), saved(0, 1, 2))


def test_one_state_of_a_job_is_everybodys() -> None:
    assert origins(3, PAIRS).own_number(record(SharingPattern.REPLICATED), saved(0)) == 0
