"""Extras (user values and objects), attributes of framework objects, objects of known classes."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from resumekit.capture.objects import AttributeState, Extras, KnownObjects
from resumekit.errors import (
    IncompleteLoadError,
    InvalidStateError,
    StateMismatchError,
    UnsupportedValueError,
)
from resumekit.state import ComponentState


class Phase:
    def __init__(self, number: int = 0) -> None:
        self.number = number

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.number = state["number"]


class Picky(Phase, ComponentState):
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
    "buffer": bytearray(b"abc"),
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
        "buffer": bytearray(b"9"),
    }
    saved_state: dict[str, Any] = dict(live)
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


def test_the_devices_of_tensors_are_saved_where_one_is_not_on_the_cpu() -> None:
    elsewhere = torch.empty(2, device="meta")
    values = {"table": {"a": (1, elsewhere)}, "recent": deque([torch.ones(1), elsewhere])}
    assert Extras(values).state_dict()["devices"] == {
        "extras['values']['table']['a'][1]": "meta",
        "extras['values']['recent'][1]": "meta",
    }
    assert "devices" not in Extras(PLAIN).state_dict()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="of a machine without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:3", "meta", "cpu", "", 5])
def test_a_tensor_of_a_device_that_is_not_there_is_restored_on_the_cpu(
    stored: Any, device: Any
) -> None:
    state = Extras({"a": torch.ones(2), "recent": deque([torch.ones(3)], maxlen=4)}).state_dict()
    devices = {
        "extras['values']['a']": device,
        "extras['values']['recent'][0]": device,
        "another": device,
    }
    live: dict[str, Any] = {}
    Extras(live).load_state_dict(stored({**state, "devices": devices}))
    assert (live["a"].device.type, live["a"].tolist()) == ("cpu", [1, 1])
    assert live["recent"].maxlen == 4
    assert live["recent"][0].tolist() == [1, 1, 1]


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
    with pytest.raises(InvalidStateError, match="extras"):
        Extras({}).check_content("extras", state)


def test_named_attributes_are_restored_and_others_stay() -> None:
    saved = AttributeState(
        SimpleNamespace(step=7, log=[{"loss": 0.5}], total=torch.tensor(1.5), name="then"),
        ("step", "log", "total"),
        key="callbacks/a",
    ).state_dict()
    live = SimpleNamespace(step=0, log=[], total=torch.tensor(0.0), name="now")
    state = AttributeState(live, ("step", "log", "total"), key="callbacks/a")
    state.check_state_dict(saved)
    assert state.load_state_dict(saved) == ()
    assert (live.step, live.log, live.total.item(), live.name) == (7, [{"loss": 0.5}], 1.5, "now")


def test_an_attribute_that_the_checkpoint_lacks_is_refused() -> None:
    state = AttributeState(SimpleNamespace(step=0, other=1), ("step", "other"), key="callbacks/a")
    with pytest.raises(StateMismatchError, match="has no other"):
        state.check_state_dict({"step": 3})
    with pytest.raises(StateMismatchError, match="callbacks/a"):
        state.check_state_dict([3])


class Stage(IntEnum):
    FIRST = 1


@dataclass
class Address:
    numel: int
    start: int


class Scaler:
    """Its constructor and its state have nothing in common."""

    made = 0

    def __init__(self, power: int) -> None:
        type(self).made += 1
        self.scale = 2.0**power
        self.dtype = torch.bfloat16
        self.nested = Address(1, 2)


KNOWN = KnownObjects(Stage, Address, Scaler)


def test_what_is_read_after_storing_is_what_was_taken_apart(
    stored: Callable[[Any], Any],
) -> None:
    state = {
        "stage": Stage.FIRST,
        "shapes": [OrderedDict(a=torch.Size([2, 3]), b=torch.Size([]))],
        "slices": ({"a": Address(6, 0)}, torch.float16),
        1: [None, True, 0.5, "text", b"bytes"],
    }
    back = KNOWN.live(stored(KNOWN.plain(state, where="state")))
    assert back == state
    assert [type(back["stage"]), type(back["shapes"][0]["a"])] == [Stage, torch.Size]


def test_no_constructor_runs_and_every_attribute_is_back(stored: Callable[[Any], Any]) -> None:
    scaler = Scaler(4)
    scaler.scale = 8.0
    made = Scaler.made
    back = KNOWN.live(stored(KNOWN.plain(scaler, where="scaler")))
    assert (type(back), vars(back)) == (Scaler, vars(scaler))
    assert Scaler.made == made


def test_tensors_stay_the_same_ones() -> None:
    tensor = torch.ones(2)
    assert KNOWN.plain({"a": [tensor]}, where="state")["a"][0] is tensor


@pytest.mark.parametrize("value", [object(), {1, 2}, Exception("no"), lambda: None])
def test_anything_else_is_refused_with_its_position(value: Any) -> None:
    with pytest.raises(UnsupportedValueError, match=r"state\['a'\]\[1\]: .*an object of class"):
        KNOWN.plain({"a": [0, value]}, where="state")


def test_an_enum_and_a_class_of_a_known_name_are_refused_unless_they_are_the_known_ones() -> None:
    Stage = IntEnum("Stage", {"FIRST": 1})  # noqa: N806 - a class
    for value in (Stage.FIRST, type("Scaler", (), {})()):
        with pytest.raises(UnsupportedValueError, match="an object of class"):
            KNOWN.plain(value, where="state")


def test_an_object_of_a_class_that_is_not_known_any_more_is_refused() -> None:
    state = KNOWN.plain({"a": Address(1, 2)}, where="state")
    with pytest.raises(StateMismatchError, match="an object of class Address"):
        KnownObjects(Stage).live(state)


class Total:
    """An object whose load relies on the keys and types of its state."""

    def __init__(self, *, fails: bool = False) -> None:
        self.total, self.fails = 0, fails

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise LookupError("no file of this name")
        self.total = state["total"] + 0


@pytest.mark.parametrize("saved", [{}, {"total": "x"}, {"total": {}}, None, [3]])
def test_a_state_that_a_copy_does_not_load_is_refused_before_the_load(saved: Any) -> None:
    live = Total()
    with pytest.raises(StateMismatchError, match=r"'it'.*its load_state_dict raises"):
        Extras({"it": live}).check_state_dict({"values": {}, "objects": {"it": saved}})
    assert live.total == 0


def test_a_state_that_a_copy_loads_is_accepted() -> None:
    state = {"values": {}, "objects": {"it": {"total": torch.tensor(3), "more": 1}}}
    Extras({"it": Total()}).check_state_dict(state)


def test_a_load_that_raises_says_that_live_objects_are_changed() -> None:
    extras = Extras({"it": Total(fails=True)})
    with pytest.raises(IncompleteLoadError, match=r"'it'.*no file of this name.*End this process"):
        extras.load_state_dict({"values": {}, "objects": {"it": {"total": 3}}})
