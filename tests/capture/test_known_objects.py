"""Objects of a framework inside its state: taken apart into plain values, and made again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import pytest
import torch

from resumekit.capture.extras import KnownObjects
from resumekit.errors import StateMismatchError, UnsupportedValueError


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
    other = IntEnum("Stage", {"FIRST": 1})
    for value in (other.FIRST, type("Scaler", (), {})()):
        with pytest.raises(UnsupportedValueError, match="an object of class"):
            KNOWN.plain(value, where="state")


def test_an_object_of_a_class_that_is_not_known_any_more_is_refused() -> None:
    state = KNOWN.plain({"a": Address(1, 2)}, where="state")
    with pytest.raises(StateMismatchError, match="an object of class Address"):
        KnownObjects(Stage).live(state)
