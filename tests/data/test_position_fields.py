"""A position in a checkpoint that lacks a field is refused by a typed error before it is loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from resumekit.data.keyed import RunSeed
from resumekit.data.position import DataPosition
from resumekit.data.prefetching import PrefetchedLoader
from resumekit.errors import InvalidStateError


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
    DataPosition().check_content("data", saved_position(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_position_that_lacks_a_field_is_refused(kind: str) -> None:
    state = saved_position(kind)["train"]
    optional = {"objects", "order"} | ({"start"} if kind == "stateful" else set())
    for field in state.keys() - optional:
        lacking = {"train": {key: value for key, value in state.items() if key != field}}
        with pytest.raises(InvalidStateError, match=field):
            DataPosition().check_content("data", lacking)


@pytest.mark.parametrize("part", ["geometry", "used", "inner"])
def test_a_part_that_lacks_a_field_is_refused(part: str) -> None:
    state = saved_position("wrapped" if part == "inner" else "map")
    state["train"][part] = {}
    with pytest.raises(InvalidStateError, match=part):
        DataPosition().check_content("data", state)


def test_it_is_refused_where_the_usage_of_an_epoch_is_asked() -> None:
    state = saved_position("map")
    del state["train"]["samples"]
    with pytest.raises(InvalidStateError, match="samples"):
        DataPosition().usage(map_style(), state)


def test_a_state_of_another_type_is_refused() -> None:
    with pytest.raises(InvalidStateError, match="expected dict"):
        DataPosition().check_content("data", [])
    with pytest.raises(InvalidStateError, match="train"):
        DataPosition().check_content("data", {"train": None})


def test_a_seed_that_is_missing_is_refused() -> None:
    RunSeed().check_content("data/seed", {"seed": 3})
    with pytest.raises(InvalidStateError, match="data/seed: seed"):
        RunSeed().check_content("data/seed", {})
