"""A position in a checkpoint that lacks a field is refused by a typed error before it is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from resumekit.data.keyed import RunSeed
from resumekit.data.position import DataPosition, epoch_usage
from resumekit.data.prefetching import PrefetchedLoader
from resumekit.errors import StateMismatchError
from resumekit.state import WorldChange


def map_style() -> Any:
    return DataLoader(TensorDataset(torch.arange(12)), batch_size=2, shuffle=True)


class Framework:
    """A framework's loader, which draws from one of torch."""

    def __init__(self) -> None:
        self.base_dataloader = map_style()

    def __iter__(self) -> Iterator[Any]:
        yield from self.base_dataloader


class Replayed:
    """An iterable without a state."""

    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(6)


class Stateful(Replayed):
    """An iterable with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


KINDS: dict[str, Callable[[], Any]] = {
    "map": map_style,
    "wrapped": Framework,
    "ahead": lambda: PrefetchedLoader(Replayed()),
    "replay": Replayed,
    "stateful": Stateful,
    "keyed": map_style,
}


def saved_position(kind: str) -> dict[str, Any]:
    """The state of a position after two batches of an epoch."""
    seed = RunSeed() if kind == "keyed" else None
    if seed is not None:
        seed.value = 0
    position = DataPosition(seed)
    feed = position.feed(KINDS[kind]())
    feed.begin(0)
    for _ in range(2):
        feed.next_batch()
    state = copy.deepcopy(position.state_dict())
    assert state["train"]["kind"] == kind
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_a_complete_position_is_accepted(kind: str) -> None:
    DataPosition().check_state_dict(saved_position(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_that_lacks_a_field_is_refused(kind: str) -> None:
    state = saved_position(kind)["train"]
    optional = {"objects", "order"} | ({"start"} if kind == "stateful" else set())
    for field in state.keys() - optional:
        lacking = {"train": {key: value for key, value in state.items() if key != field}}
        with pytest.raises(StateMismatchError, match=field):
            DataPosition().check_state_dict(lacking)


@pytest.mark.parametrize("part", ["geometry", "used", "inner"])
def test_a_part_that_lacks_a_field_is_refused(part: str) -> None:
    state = saved_position("wrapped" if part == "inner" else "map")
    state["train"][part] = {}
    with pytest.raises(StateMismatchError, match=part):
        DataPosition().check_state_dict(state)


def test_it_is_refused_wherever_positions_are_read() -> None:
    state = saved_position("map")
    del state["train"]["samples"]
    with pytest.raises(StateMismatchError, match="no samples in the checkpoint"):
        epoch_usage(DataPosition(), map_style(), state)
    change = WorldChange(rank=0, world_size=2, former_world_size=1)
    with pytest.raises(StateMismatchError, match="no samples in the checkpoint"):
        DataPosition().resplit_state_dict({0: state}, change)


def test_a_state_of_another_type_is_refused() -> None:
    with pytest.raises(StateMismatchError, match="expected a dict"):
        DataPosition().check_state_dict([])
    with pytest.raises(StateMismatchError, match="train"):
        DataPosition().check_state_dict({"train": None})


def test_a_seed_that_is_missing_is_refused() -> None:
    RunSeed().check_state_dict({"seed": 3})
    with pytest.raises(StateMismatchError, match="data/seed: seed"):
        RunSeed().check_state_dict({})
