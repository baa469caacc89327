"""Which parameters are frozen comes back when user code has set what it begins with."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from resumekit.capture import FrozenParameters
from resumekit.errors import StateMismatchError


def model(*frozen: str) -> nn.Module:
    made = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    for name, parameter in made.named_parameters():
        parameter.requires_grad = name not in frozen
    return made


def test_it_freezes_and_lets_go_at_the_end_and_says_so(stored: Any) -> None:
    saved = FrozenParameters(model("0.weight", "1.bias"), key="frozen")
    live = model("1.bias", "2.weight")
    frozen = FrozenParameters(live, key="frozen")
    state = stored(saved.state_dict())
    frozen.check_state_dict(state)
    frozen.load_state_dict(state)
    assert frozen.state_dict() == saved.state_dict()
    assert live[2].weight.requires_grad is False  # not yet
    assert frozen.put_back().endswith("as this launch has set it: 0.weight, 2.weight")
    assert frozen.state_dict() == saved.state_dict()
    assert frozen.put_back() == ""


def test_what_is_so_anyway_is_not_told() -> None:
    frozen = FrozenParameters(model("0.bias"), key="frozen")
    frozen.load_state_dict({"names": ["0.bias"]})
    assert frozen.put_back() == ""


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(StateMismatchError):
        FrozenParameters(model(), key="frozen").check_state_dict({"names": 3})
