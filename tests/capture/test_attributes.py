"""Plain attributes of a framework's object."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from resumekit.capture import AttributeState
from resumekit.errors import StateMismatchError


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
