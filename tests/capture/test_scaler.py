"""The gradient scaler continues, or starts afresh and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from resumekit.capture.objects import ScalerState
from resumekit.errors import InvalidStateError, StateMismatchError


def scaler(*, enabled: bool = True) -> GradScaler:
    return GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=enabled)


def steps(grad_scaler: GradScaler, num_steps: int, *, overflow_at: int = -1) -> list[float]:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scales = []
    for step in range(num_steps):
        optimizer.zero_grad()
        factor = float("inf") if step == overflow_at else 1.0
        grad_scaler.scale((parameter * factor).sum()).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        scales.append(grad_scaler.get_scale())
    return scales


@pytest.mark.parametrize("used_before", [False, True], ids=["fresh", "used"])
def test_scale_and_growth_continue(used_before: bool, stored: Any, assert_same: Any) -> None:
    running = scaler()
    steps(running, 4, overflow_at=1)
    saved = stored(ScalerState(running).state_dict())
    expected = steps(running, 6)
    live = scaler()
    if used_before:
        steps(live, 2)
    state = ScalerState(live)
    state.check_state_dict(saved)
    assert state.load_state_dict(saved) == ()
    assert_same(state.state_dict(), saved)
    assert steps(live, 6) == expected
    assert steps(scaler(), 6) != expected


def test_a_disabled_scaler_is_restored_disabled(stored: Any) -> None:
    saved = stored(ScalerState(scaler(enabled=False)).state_dict())
    live = ScalerState(scaler(enabled=False))
    live.check_state_dict(saved)
    assert live.load_state_dict(saved) == ()
    assert live.start_fresh() == ()


def test_a_checkpoint_of_a_disabled_scaler_starts_the_enabled_one_afresh(stored: Any) -> None:
    saved = stored(ScalerState(scaler(enabled=False)).state_dict())
    live = ScalerState(scaler())
    live.check_state_dict(saved)
    (message,) = live.load_state_dict(saved)
    assert "afresh" in message
    assert live.scaler.get_scale() == 2.0**10
    assert live.start_fresh() == (message,)


def test_the_state_of_an_enabled_scaler_is_unused_by_a_disabled_one(
    stored: Any,
) -> None:
    saved = stored(ScalerState(scaler()).state_dict())
    live = ScalerState(scaler(enabled=False))
    live.check_state_dict(saved)
    (message,) = live.load_state_dict(saved)
    assert "disabled" in message


def test_a_missing_value_is_refused(stored: Any) -> None:
    saved = stored(ScalerState(scaler()).state_dict())
    del saved["values"]["scale"]
    with pytest.raises(StateMismatchError, match="grad_scaler: scale: not in the checkpoint"):
        ScalerState(scaler()).check_state_dict(saved)


def test_an_integer_that_torch_does_not_take_is_refused(stored: Any) -> None:
    saved = stored(ScalerState(scaler()).state_dict())
    saved["values"]["growth_interval"] = 1 << 70
    with pytest.raises(StateMismatchError, match="grad_scaler: growth_interval"):
        ScalerState(scaler()).check_state_dict(saved)


@pytest.mark.parametrize("state", [None, {}, {"values": 3}])
def test_what_is_no_scaler_state_is_refused(state: Any) -> None:
    with pytest.raises(InvalidStateError, match="grad_scaler"):
        ScalerState(scaler()).check_content("grad_scaler", state)


def test_the_fingerprint_says_whether_it_is_enabled() -> None:
    assert ScalerState(scaler()).fingerprint()["enabled"] is True
    assert ScalerState(scaler(enabled=False)).fingerprint()["enabled"] is False
