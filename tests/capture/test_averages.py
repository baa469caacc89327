"""Averaged weights continue: torch's AveragedModel, a plain module, a user object."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from resumekit.capture.objects import ObjectState
from resumekit.errors import StateMismatchError
from resumekit.state import ComponentState, WorldChange


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def average(model: nn.Module, **arguments: Any) -> AveragedModel:
    return AveragedModel(model, **arguments)


def drift(model: nn.Module, averaged: AveragedModel, num_steps: int) -> None:
    for _ in range(num_steps):
        with torch.no_grad():
            for value in model.state_dict().values():
                value.add_(1)
        averaged.update_parameters(model)


KINDS: dict[str, dict[str, Any]] = {
    "equal weights": {},
    "equal weights with buffers": {"use_buffers": True},
    "exponential": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "exponential with buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
    "own function": {"avg_fn": lambda mean, value, n: mean + (value - mean) / (n + 2)},
}
WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "DataParallel": DataParallel,
    "compiled": compiled,
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_averaged_model_continues(kind: str, stored: Any, assert_same: Any) -> None:
    model: Any = net()
    # Averages of equal whole numbers of buffers cannot be taken by torch for integer buffers.
    model[1].num_batches_tracked = model[1].num_batches_tracked.float()
    running = average(model, **KINDS[kind])
    drift(model, running, 3)
    saved, model_then = stored(ObjectState(running).state_dict()), copy.deepcopy(model)
    drift(model, running, 3)

    live_model = copy.deepcopy(model_then)
    live = average(live_model, **KINDS[kind])
    state = ObjectState(live)
    state.check_state_dict(saved)
    assert state.load_state_dict(saved) == ()
    drift(live_model, live, 3)
    assert_same(state.state_dict(), stored(ObjectState(running).state_dict()))

    forgotten = average(model_then, **KINDS[kind])
    drift(model_then, forgotten, 3)
    found, expected = (stored(ObjectState(each).state_dict()) for each in (forgotten, running))
    assert not torch.equal(found["weights"]["0.weight"], expected["weights"]["0.weight"])


@pytest.mark.parametrize("then", WRAPPERS)
@pytest.mark.parametrize("now", WRAPPERS)
def test_names_do_not_depend_on_wrappers(then: str, now: str, stored: Any) -> None:
    model = WRAPPERS[then](net())
    running = average(model)
    drift(model, running, 2)
    saved = stored(ObjectState(running).state_dict())
    assert list(saved["weights"]) == list(net().state_dict())
    live = ObjectState(average(WRAPPERS[now](net())))
    live.check_state_dict(saved)
    live.load_state_dict(saved)
    assert live.given.n_averaged.item() == 2


def test_loading_keeps_the_live_tensors(stored: Any) -> None:
    live = ObjectState(average(net()))
    counter, weight = live.given.n_averaged, live.given.module[0].weight
    live.load_state_dict(stored(ObjectState(average(net())).state_dict()))
    assert live.given.n_averaged is counter
    assert live.given.module[0].weight is weight


def test_a_plain_copy_of_the_model_is_stored_like_a_model(stored: Any, assert_same: Any) -> None:
    saved = stored(ObjectState(net()).state_dict())
    live = ObjectState(net())
    live.check_state_dict(saved)
    live.load_state_dict(saved)
    assert_same(live.state_dict(), saved)


class Shadow:
    """A user's own averaged weights."""

    def __init__(self) -> None:
        self.shadow = {"weight": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def test_an_object_of_ones_own_is_stored_as_it_gives_itself(stored: Any) -> None:
    running, live = ObjectState(Shadow()), ObjectState(Shadow())
    running.given.shadow["weight"] += 1
    saved = stored(running.state_dict())
    live.check_state_dict(saved)
    live.load_state_dict(saved)
    saved["opaque"]["shadow"]["weight"] += 1
    assert live.given.shadow["weight"].tolist() == [1, 1]


class Summed(Shadow, ComponentState):
    """One that knows what becomes of it when the ranks change."""

    def resplit_state_dict(self, states: Any, change: WorldChange) -> tuple[dict[str, Any], Any]:
        total = sum(states[rank]["shadow"]["weight"] for rank in change.inherited)
        return {"shadow": {"weight": total}}, ["summed up"]


def test_what_an_object_makes_of_other_ranks_states_is_asked_of_it() -> None:
    states = {rank: ObjectState(Summed()).state_dict() for rank in range(3)}
    for rank, state in states.items():
        state["opaque"]["shadow"]["weight"] += rank
    change = WorldChange(0, 1, 3)
    resplit = ObjectState(Summed()).resplit_state_dict(states, change)
    assert resplit is not None
    state, messages = resplit
    live = ObjectState(Summed())
    live.check_state_dict(state)
    live.load_state_dict(state)
    assert live.given.shadow["weight"].tolist() == [3, 3]
    assert messages == ["summed up"]
    everyday = type("Everyday", (Shadow,), {"resplit_state_dict": lambda self, ratio: ratio})
    assert ObjectState(everyday()).resplit_state_dict(states, change) is None
    assert ObjectState(Shadow()).resplit_state_dict(states, change) is None
    assert ObjectState(net()).resplit_state_dict(states, change) is None


def refused(live: ObjectState, saved: Any) -> str:
    with pytest.raises(StateMismatchError) as caught:
        live.check_state_dict(saved)
    assert caught.value.remedy
    return str(caught.value)


def test_another_kind_of_average_is_refused(stored: Any) -> None:
    kinds = {"averaged": average(net()), "module": net(), "own": Shadow()}
    states = {name: stored(ObjectState(each).state_dict()) for name, each in kinds.items()}
    assert "n_averaged" in refused(ObjectState(kinds["averaged"]), states["module"])
    assert "ema" in refused(ObjectState(kinds["averaged"]), states["own"])
    assert "ema" in refused(ObjectState(kinds["own"]), states["averaged"])
    states["own"]["class"] = "another.Shade"
    assert "another.Shade" in refused(ObjectState(kinds["own"]), states["own"])


def test_weights_that_do_not_fit_are_refused(stored: Any) -> None:
    saved = stored(ObjectState(average(net())).state_dict())
    live = ObjectState(average(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))))
    assert "ema: 0.weight" in refused(live, saved)


@pytest.mark.parametrize("state", [None, {}, {"weights": {}}])
def test_what_is_no_average_is_refused(state: Any) -> None:
    with pytest.raises(StateMismatchError, match="ema"):
        ObjectState(average(net())).check_state_dict(state)
