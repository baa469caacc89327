"""Submodules that training adds, removes or replaces are reported by their paths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from resumekit.capture import Holder, UserState
from resumekit.contract import Fidelity


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
        self.lazy = nn.LazyLinear(2)


class Criterion:
    """Of a script: an object with a module."""

    def __init__(self) -> None:
        self.net = Growing()


CHANGES: dict[str, tuple[Callable[[Growing], object], str]] = {
    "added": (lambda net: net.layers.append(nn.Linear(2, 2)), "layers.2"),
    "removed": (lambda net: net.layers.pop(1), "layers.1"),
    "replaced": (lambda net: net.layers.__setitem__(1, nn.Tanh()), "layers.1"),
}


def lost(state: UserState) -> dict[str, str]:
    return {e.key: e.reason for e in state.findings() if e.fidelity is Fidelity.LOST}


@pytest.mark.parametrize("is_component", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_submodule_is_reported(what: str, is_component: bool) -> None:
    criterion = Criterion()
    given = Holder(criterion.net, is_component=True) if is_component else Holder(criterion)
    prefix = "it." if is_component else "it.net."
    state = UserState({"it": given}, key="attributes")
    state.restore_now()
    assert not lost(state)

    change, path = CHANGES[what]
    change(criterion.net)
    reasons = lost(state)
    assert set(reasons) == {prefix + path}
    assert f"training {what} this module" in reasons[prefix + path]

    state.configure(transient={path}, limit_bytes=10**6)
    assert not lost(state)


def test_what_is_changed_before_the_first_batch_is_not_reported() -> None:
    criterion = Criterion()
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
