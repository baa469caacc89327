"""Extras: user values, and objects with state."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch

from resumekit.capture import Extras
from resumekit.errors import StateMismatchError


class Phase:
    def __init__(self, number: int = 0) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Picky(Phase):
    def check_state_dict(self, state: dict[str, int]) -> None:
        if state["number"] < 0:
            raise StateMismatchError("picky", found="a negative number")


PLAIN: dict[Any, Any] = {
    "phase": 3,
    "run_id": "abc",
    "best": float("nan"),
    "none": None,
    7: "an integer key",
    "history": [1, [2.5]],
    "seen": {1, 2},
    "counts": Counter(a=2),
    "recent": deque([1, 2], maxlen=2),
    "by_name": defaultdict(list, a=[1]),
    "ordered": OrderedDict(b=1, a=2),
    "table": {"a": {"b": (1, 2)}},
    "mean": torch.ones(2),
    "array": np.arange(3),
}


def test_values_and_objects_are_restored(stored: Any, assert_same: Any) -> None:
    saved = stored(Extras({**PLAIN, "object": Phase(5)}).state_dict())
    live: dict[Any, Any] = {"object": Phase(), "phase": 0}
    extras = Extras(live)
    extras.check_state_dict(saved)
    assert extras.load_state_dict(saved) == ()
    assert_same(extras.state_dict()["values"], {"phase": 3, **PLAIN})
    assert live["object"].number == 5


def test_objects_containers_and_tensors_that_others_hold_are_filled_in_place(stored: Any) -> None:
    saved = stored(Extras({**PLAIN, "object": Phase(5)}).state_dict())
    live = {
        "object": Phase(),
        "history": [9],
        "seen": {9},
        "counts": Counter(b=9),
        "recent": deque([9], maxlen=2),
        "by_name": defaultdict(list),
        "ordered": OrderedDict(),
        "table": {},
        "mean": torch.zeros(2),
    }
    saved_state = dict(live)
    Extras(live).load_state_dict(saved)
    for name, value in saved_state.items():
        assert live[name] is value, name
    assert saved_state["history"] == [1, [2.5]]
    assert saved_state["counts"] == Counter(a=2)
    assert saved_state["mean"].tolist() == [1, 1]


def test_a_value_of_another_kind_is_replaced(stored: Any) -> None:
    saved = stored(Extras({"a": [1], "b": torch.ones(2), "c": 1}).state_dict())
    live: dict[str, Any] = {"a": 3, "b": torch.zeros(3), "c": [1]}
    Extras(live).load_state_dict(saved)
    assert live["a"] == [1]
    assert live["b"].tolist() == [1, 1]
    assert live["c"] == 1


def test_nothing_is_shared_with_the_loaded_state(stored: Any) -> None:
    saved = stored(Extras({"a": [[1]], "t": torch.ones(1)}).state_dict())
    live: dict[str, Any] = {}
    Extras(live).load_state_dict(saved)
    saved["values"]["a"][0].append(2)
    saved["values"]["t"].add_(1)
    assert live["a"] == [[1]]
    assert live["t"].item() == 1


def test_a_value_that_the_checkpoint_lacks_stays_and_is_reported(stored: Any) -> None:
    live = {"new": 4}
    extras = Extras(live)
    saved = stored(Extras({}).state_dict())
    extras.check_state_dict(saved)
    assert extras.load_state_dict(saved) == ("'new' is not in the checkpoint and keeps its value",)
    assert live == {"new": 4}


def refused(live: dict[Any, Any], saved: Any) -> str:
    with pytest.raises(StateMismatchError) as caught:
        Extras(live).check_state_dict(saved)
    return str(caught.value)


def test_an_object_on_one_side_only_is_refused(stored: Any) -> None:
    with_object = stored(Extras({"it": Phase()}).state_dict())
    assert "'it'" in refused({}, with_object)
    assert "expected an int" in refused({"it": 3}, with_object)
    assert "'it': a plain value" in refused({"it": Phase()}, stored(Extras({"it": 3}).state_dict()))
    assert "not in the checkpoint" in refused({"it": Phase()}, stored(Extras({}).state_dict()))


def test_an_object_may_refuse_its_own_state(stored: Any) -> None:
    saved = stored(Extras({"it": Picky(-1)}).state_dict())
    assert "negative" in refused({"it": Picky()}, saved)


@pytest.mark.parametrize("state", [None, {}, {"values": []}])
def test_what_is_no_state_of_extras_is_refused(state: Any) -> None:
    assert "extras" in refused({}, state)
