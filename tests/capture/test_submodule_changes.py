"""Parts of modules that training adds, removes or replaces are reported by their paths."""

from __future__ import annotations

import copy
import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.user_state import UserState
from resumekit.errors import StateMismatchError
from resumekit.state import Fidelity


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
        self.lazy = nn.LazyLinear(2)
        self.handle = self.register_forward_hook(doubled)


class Criterion:
    """Of a script: an object with a module."""

    def __init__(self, net: Any) -> None:
        self.net = net


def doubled(module: nn.Module, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


CHANGES: dict[str, tuple[Callable[[Growing], object], str]] = {
    "added this module": (lambda net: net.layers.append(nn.Linear(2, 2)), "layers.2"),
    "removed this module": (lambda net: net.layers.pop(0), "layers.0"),
    "replaced this module": (
        lambda net: net.layers.__setitem__(0, nn.Bilinear(2, 2, 2)),
        "layers.0",
    ),
    "added this parameter": (
        lambda net: net.register_parameter("scale", nn.Parameter(torch.ones(2))),
        "scale",
    ),
    "removed this parameter": (lambda net: delattr(net.layers[0], "bias"), "layers.0.bias"),
    "added this buffer": (lambda net: net.register_buffer("mean", torch.zeros(2)), "mean"),
    "added this hook": (
        lambda net: net.layers[1].register_forward_hook(doubled),
        "layers.1.doubled()",
    ),
    "removed this hook": (lambda net: net.handle.remove(), "doubled()"),
}


def lost(state: UserState) -> dict[str, str]:
    return {e.key: e.reason for e in state.findings() if e.fidelity is Fidelity.LOST}


@pytest.mark.parametrize("is_component", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_part_of_a_module_is_reported(what: str, is_component: bool) -> None:
    criterion = Criterion(Growing())
    given = Holder(criterion.net, is_component=True) if is_component else Holder(criterion)
    prefix = "it." if is_component else "it.net."
    state = UserState({"it": given}, key="attributes")
    state.restore_now()
    assert not lost(state)

    change, path = CHANGES[what]
    change(criterion.net)
    reasons = lost(state)
    assert set(reasons) == {prefix + path}
    assert f"training {what}" in reasons[prefix + path]
    is_refused = is_component and "hook" not in what and ("added" in what or "parameter" in what)
    assert ("no launch can resume this run; do that before" in reasons[prefix + path]) == is_refused

    state.configure(transient={path}, limit_bytes=10**6)
    assert not lost(state)


def test_what_is_changed_before_the_first_batch_is_not_reported() -> None:
    criterion = Criterion(Growing())
    state = UserState({"it": criterion}, key="attributes")
    criterion.net.layers.append(nn.Linear(2, 2))
    state.restore_now()
    assert not lost(state)


def test_a_lazy_module_that_gets_its_class_is_not_reported() -> None:
    net = Growing()
    state = UserState({"it": Holder(net, is_component=True)}, key="attributes")
    state.restore_now()
    net.lazy(torch.zeros(1, 3))
    assert type(net.lazy) is nn.Linear
    assert not lost(state)


def test_a_buffer_outside_of_the_state_dict_is_added_again(stored: Any) -> None:
    def made() -> tuple[Growing, UserState]:
        net = Growing()
        return net, UserState({"it": Holder(net, is_component=True)}, key="attributes")

    net, saved = made()
    net.register_buffer("mask", torch.tensor([1.0, 0.0]), persistent=False)
    assert not lost(saved)
    again, live = made()
    live.load_state_dict(stored(saved.state_dict()))
    live.restore_now()
    assert again.get_buffer("mask").tolist() == [1.0, 0.0]
    assert "mask" not in again.state_dict()


class Sums(nn.Module):
    """A metric: what it holds is in no ``state_dict``."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(1)


class Tracker(nn.ModuleList):
    """Appends a metric in each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.original = Sums()

    def increment(self) -> None:
        self.append(copy.deepcopy(self.original))


@pytest.mark.parametrize("is_component", [False, True])
@pytest.mark.parametrize(("num_saved", "num_before"), [(2, 0), (2, 1), (1, 2)])
def test_copies_of_a_submodule_are_made_again(
    num_saved: int, num_before: int, is_component: bool, stored: Any
) -> None:
    def made(num_copies: int) -> tuple[Any, UserState]:
        tracker = Tracker()
        holder = Holder(tracker, is_component=True) if is_component else {"tracker": tracker}
        state = UserState({"it": holder}, key="attributes")
        for _ in range(num_copies):
            tracker.increment()
        return tracker, state

    tracker, saved = made(num_saved)
    for number, each in enumerate(tracker):
        each.total += number + 1
    live_tracker, live = made(num_before)
    state = stored(saved.state_dict())
    live.check_state_dict(state)
    assert live.load_state_dict(state) == ()
    live.restore_now()
    assert [each.total.item() for each in live_tracker] == [each.total.item() for each in tracker]
    assert live.comparable_state() == saved.comparable_state()
    assert not lost(live)


@pytest.mark.parametrize("is_component", [False, True])
def test_a_module_without_parameters_is_replaced_and_removed_again(
    is_component: bool, stored: Any
) -> None:
    def made() -> tuple[Growing, UserState]:
        net = Growing()
        net.layers.append(nn.Dropout(0.5))
        holder = Holder(net, is_component=True) if is_component else Holder(Criterion(net))
        return net, UserState({"it": holder}, key="attributes")

    net, saved = made()
    net.layers[1] = nn.Tanh()
    del net.layers[2]
    live_net, live = made()
    state = stored(saved.state_dict())
    live.check_state_dict(state)
    assert live.load_state_dict(state) == ()
    live.restore_now()
    assert repr(live_net.layers) == repr(net.layers)
    assert not lost(live)


@pytest.mark.parametrize("begins_with_it", [False, True])
def test_a_copy_of_a_model_that_training_makes_is_made_again(
    begins_with_it: bool, stored: Any
) -> None:
    def made() -> tuple[nn.Module, Any, UserState]:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Flatten())
        best = Criterion(model if begins_with_it else None)
        return model, best, UserState({"it": best}, key="attributes", foreign=lambda: [model])

    model, best, saved = made()
    best.net = copy.deepcopy(model).eval()
    best.net[0].weight.data.fill_(2.0)
    best.net[1](torch.ones(2, 2))
    best.net[0].weight.requires_grad_(False)
    state = stored(saved.state_dict())
    assert not lost(saved)
    _, again, live = made()
    live.check_state_dict(state)
    live.load_state_dict(state)
    live.restore_now()
    assert again.net(torch.ones(3, 2)).tolist() == best.net(torch.ones(3, 2)).tolist()
    flags = [[p.requires_grad for p in each.parameters()] for each in (again.net, best.net)]
    assert flags[0] == flags[1] == [False, True, True, True]
    assert all(type(each) is nn.Parameter for each in again.net.parameters())
    assert str(again.net) == str(best.net)
    assert not again.net.training


class Wrapping(nn.Module):
    """Keeps a function that belongs to it alone, and an object of a library."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.log = logging.getLogger("x")
        self.bound = functools.wraps(self.twice)(lambda: self.weight * 2)

    def twice(self) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("has_twin", [True, False])
def test_what_cannot_be_saved_of_a_new_module_is_that_of_a_copy(
    has_twin: bool, stored: Any
) -> None:
    def made() -> tuple[Any, UserState]:
        best = Criterion(None)
        foreign = [Wrapping()] if has_twin else []
        return best, UserState({"it": best}, key="attributes", foreign=lambda: foreign)

    best, saved = made()
    best.net = Wrapping()
    best.net.weight.data.fill_(3.0)
    if not has_twin:
        assert set(lost(saved)) == {"it.net"}
        return
    state = stored(saved.state_dict())
    again, live = made()
    live.check_state_dict(state)
    live.load_state_dict(state)
    live.restore_now()
    again.net.weight.data.add_(1.0)
    assert again.net.weight.tolist() == [4.0, 4.0]
    assert best.net.bound().tolist() == [6.0, 6.0]


@pytest.mark.parametrize(
    ("name", "value", "of_twin"),
    [
        ("position", iter([1, 2]), iter([1, 2])),
        ("api_key", "hidden", "hidden"),
        ("kinds", {int, list}, {int, dict}),
        ("kinds", [iter([1])], [iter([1])]),
    ],
)
def test_state_of_a_new_module_that_cannot_be_saved_is_none_of_a_copy(
    name: str, value: Any, of_twin: Any
) -> None:
    best, twin, new = Criterion(None), Wrapping(), Wrapping()
    saved = UserState({"it": best}, key="attributes", foreign=lambda: [twin])
    setattr(twin, name, of_twin)
    setattr(new, name, value)
    best.net = new
    assert set(lost(saved)) == {"it.net"}


@pytest.mark.parametrize("name", ["forward", "-1", ""])
def test_names_of_modules_are_numbers(name: str) -> None:
    state = UserState({"it": Tracker()}, key="attributes")
    slot = ["it", "modules", "", [0]]
    nodes = [["dict", [name], [[1]], None], ["object", "it.original", "test.Sums"]]
    wrong = {**state.state_dict(), "slots": [slot], "nodes": json.dumps(nodes)}
    state.check_state_dict(wrong)
    state.load_state_dict(wrong)
    with pytest.raises(StateMismatchError):
        state.restore_now()
