"""Digests of leaves: the same for the same bits, different for the smallest difference."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch

from resumekit.errors import UnsupportedValueError
from resumekit.serialization.digests import leaf_digests, state_digest

Point = namedtuple("Point", ["x", "y"])


class Phase(Enum):
    WARMUP = (1, "warmup")


def state() -> dict[str, Any]:
    return {
        "model": OrderedDict({"layer.0.weight": torch.arange(6.0).view(2, 3), "step": 3}),
        "state": {0: {"exp_avg": torch.ones(2, dtype=torch.bfloat16)}},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "name": None}],
        "names": {"b", "a", (1, 2)},
        "zero": 0.0,
        "empty": [],
        "bytes": b"x" * 3000,
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "order": list(range(2000)),
        "scalar": np.float64(0.5),
        "more": [True, 2**80, 1j, "text", Point(1, deque([2])), defaultdict(int, {2.5: 1})],
    }


def _flip(state: Any) -> None:
    state["model"]["layer.0.weight"].view(torch.int32)[0].bitwise_xor_(1)


def _put(value: Any, *keys: Any) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = value

    return change


HALF = torch.ones(2, dtype=torch.float16)
WEIGHT = ("model", "layer.0.weight")

CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "a bit of a weight": ("model.layer.0.weight", _flip),
    "a shape": ("model.layer.0.weight", _put(torch.arange(6.0), *WEIGHT)),
    "a dtype": ("state[0].exp_avg", _put(HALF, "state", 0, "exp_avg")),
    "the sign of a float": ("groups[0].lr", _put(-0.1, "groups", 0, "lr")),
    "the last bit of a float": ("groups[0].lr", _put(0.1 + 2**-56, "groups", 0, "lr")),
    "the sign of zero": ("zero", _put(-0.0, "zero")),
    "an int for a bool": ("more[0]", _put(1, "more", 0)),
    "a float for an int": ("model.step", _put(3.0, "model", "step")),
    "a member of a set": ("names", _put({"b", "a", (1, 3)}, "names")),
    "an empty dict for an empty list": ("empty", _put({}, "empty")),
    "a bytearray for bytes": ("bytes", _put(bytearray(b"x" * 3000), "bytes")),
    "the last byte": ("bytes", _put(b"x" * 2999 + b"y", "bytes")),
    "an element of an array": ("array", _put(9, "array", (1, 2))),
    "a number in a long list": ("order", _put(0, "order", 1999)),
    "the dtype of a scalar": ("scalar", _put(np.float32(0.5), "scalar")),
    "a huge int": ("more[1]", _put(2**80 + 1, "more", 1)),
    "a field": ("more[4].y[0]", _put(Point(1, deque([3])), "more", 4)),
    "a value under a float key": ("more[5][2.5]", _put(2, "more", 5, 2.5)),
}


@pytest.mark.parametrize(("leaf", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_of_one_leaf_changes_its_digest_and_no_other(
    leaf: str, change: Callable[[Any], None]
) -> None:
    before, changed = leaf_digests(state()), state()
    change(changed)
    after = leaf_digests(changed)
    assert {name for name in before if before[name] != after.get(name)} == {leaf}
    assert set(after) == set(before)
    assert state_digest(changed) != state_digest(state())


def test_every_leaf_of_a_state_has_its_digest() -> None:
    assert list(leaf_digests(state())) == [
        "model.layer.0.weight", "model.step", "state[0].exp_avg", "groups[0].lr",
        "groups[0].betas[0]", "groups[0].betas[1]", "groups[0].name", "names", "zero", "empty",
        "bytes", "array", "order", "scalar", "more[0]", "more[1]", "more[2]", "more[3]",
        "more[4].x", "more[4].y[0]", "more[5][2.5]",
    ]  # fmt: skip


def test_a_key_of_another_type_is_another_leaf() -> None:
    assert leaf_digests({0: 1}) != leaf_digests({"0": 1})


def test_a_state_has_the_same_digests_after_a_load(checkpoints: Any) -> None:
    for value in (state(), {"phase": Phase.WARMUP, Phase.WARMUP: 1}, 5, None, {}):
        found = checkpoints.round_trip(value)
        assert leaf_digests(found) == leaf_digests(value)
        assert state_digest(found) == state_digest(value)


def test_memory_layout_parameters_and_order_of_keys_do_not_count() -> None:
    weight = torch.arange(6.0).view(2, 3)
    same: list[Any] = [
        {"a": weight, "b": 1},
        {"b": 1, "a": weight.t().contiguous().t()},
        {"a": torch.nn.Parameter(weight), "b": 1},
    ]
    assert len({state_digest(value) for value in same}) == 1
    array = np.arange(6).reshape(2, 3)
    assert state_digest(array) == state_digest(np.asfortranarray(array))


def test_digests_are_the_same_in_another_process() -> None:
    code = (
        "import torch; from resumekit.serialization.digests import state_digest; "
        "print(state_digest({'s': {'b', 'a', 'c'}, 't': torch.arange(5), 'f': [0.1, b'x']}))"
    )
    # A hash seed of its own: its sets have another order.
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    expected = state_digest({"s": {"b", "a", "c"}, "t": torch.arange(5), "f": [0.1, b"x"]})
    assert done.stdout.strip() == expected


def test_what_has_no_digest_is_named() -> None:
    with pytest.raises(UnsupportedValueError, match=r"^state\['a'\]\[0\]: .*function"):
        leaf_digests({"a": [lambda: 0]})
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(UnsupportedValueError, match="part of itself"):
        leaf_digests(cycle)
