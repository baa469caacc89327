"""Objects in the state of an optimizer: their attributes, and which classes a file may name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from resumekit.adapters.torch import Checkpointer
from resumekit.capture.optimizer import OptimizerState
from resumekit.errors import StateMismatchError, UnsupportedValueError


class Projector:
    """As that of GaLore: chooses a subspace now and then."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.basis: torch.Tensor | None = None

    def project(self, gradient: torch.Tensor, step: int) -> torch.Tensor:
        if self.basis is None or step % 5 == 0:
            self.basis = torch.linalg.svd(gradient, full_matrices=False).U[:, : self.rank]
        return self.basis.T @ gradient


class Projected(torch.optim.Optimizer):
    """SGD with momentum in the subspace; all its state is made in the first step."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state |= {"step": 0, "projector": Projector(2), "momentum": 0.0}
            gradient = state["projector"].project(parameter.grad, state["step"])
            state["momentum"] = 0.9 * state["momentum"] + gradient
            state["step"] += 1
            update = state["projector"].basis @ state["momentum"]
            parameter.sub_(self.param_groups[0]["lr"] * update)


def _trained(directory: Path, stops_at: int, *, forgets: bool = False) -> dict[int, str]:
    """The loss of each step of a launch.

    Args:
        directory: of the run.
        stops_at: the last step.
        forgets: the first batch of the resumed launch finds no basis, as if that were not saved.
    """
    torch.manual_seed(0)
    model, losses = nn.Linear(4, 4, bias=False), dict[int, str]()
    optimizer = Projected(model.parameters())
    loader: Any = DataLoader(torch.randn(96, 4), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    checkpointer = Checkpointer(directory, model=model, optimizer=optimizer, save_every=3)
    for batch in checkpointer.batches(loader, epochs=1):
        if forgets and checkpointer.progress.step == 6:
            optimizer.state[model.weight]["projector"].basis = None
        loss = (model(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        checkpointer.step(loss=loss)
        losses[checkpointer.progress.step] = loss.item().hex()
        if checkpointer.progress.step == stops_at:
            checkpointer.__exit__(KeyboardInterrupt, None, None)  # as a kill: no last save
            break
    return losses


@pytest.mark.parametrize("forgets", [False, True], ids=["restored", "control"])
def test_a_resumed_run_continues_in_the_subspace(forgets: bool, tmp_path: Path) -> None:
    whole = _trained(tmp_path / "whole", stops_at=24)
    _trained(tmp_path / "killed", stops_at=7)  # the next subspace is chosen in step 11
    resumed = _trained(tmp_path / "killed", stops_at=24, forgets=forgets)
    assert resumed.keys() == whole.keys() == set(range(1, 25))
    assert (resumed == whole) != forgets


def _state(*, steps: int = 3) -> tuple[OptimizerState, Projected, nn.Linear]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    optimizer = Projected(model.parameters())
    for _ in range(steps):
        model(torch.randn(4)).sum().backward()
        optimizer.step()
    return OptimizerState(optimizer, {"model": model}), optimizer, model


def test_an_object_that_is_there_stays_the_same_object(stored: Any) -> None:
    saved = stored(_state()[0].state_dict())
    live, optimizer, model = _state(steps=1)
    before = optimizer.state[model.weight]["projector"]
    basis = before.basis
    before.further = 1  # an attribute that the saved object has not
    live.check_state_dict(saved)
    live.load_state_dict(saved)
    assert optimizer.state[model.weight]["projector"] is before
    assert before.basis is basis
    assert vars(before).keys() == {"rank", "basis"}
    assert torch.equal(before.basis, saved["state"]["weight"]["projector"]["attributes"]["basis"])


@pytest.mark.parametrize("name", ["os.system", "subprocess.Popen", "builtins.eval", "pathlib.Path"])
def test_a_class_that_the_optimizers_module_has_not_is_refused(name: str, stored: Any) -> None:
    saved = stored(_state()[0].state_dict())
    saved["state"]["weight"]["projector"]["object of class"] = name
    live, optimizer, model = _state(steps=0)
    with pytest.raises(StateMismatchError, match=name):
        live.check_state_dict(saved)
    assert not optimizer.state[model.weight]


def test_what_is_no_plain_object_cannot_be_stored(stored: Any) -> None:
    state, optimizer, model = _state()
    optimizer.state[model.weight]["projector"] = range  # no object of the module's
    with pytest.raises(UnsupportedValueError, match="projector"):
        stored(state.state_dict())
