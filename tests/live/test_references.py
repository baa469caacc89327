"""Variables, items and attributes that training makes refer to a model, an optimizer or a part."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import InexactError

Train = Callable[["Trained"], None]
NUM_STEPS = 9


class CrashError(Exception):
    """Ends a launch inside a step."""


class Records:
    """What the trainings of a test did; nothing of a loop refers to it."""

    losses: dict[int, str]
    crash_at: int


class Pair(nn.Module):
    """Two linear maps, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.first(x))


class Trained:
    """Two models, each with its optimizer; a step trains one, with a loss that depends on more."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.other = Pair(), Pair()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.slower = torch.optim.SGD(self.other.parameters(), lr=0.05)
        self.ckpt = Checkpointer(
            directory,
            model={"one": self.model, "two": self.other},
            optimizer={"one": self.optimizer, "two": self.slower},
            **{"save_every": 2, "strict": True, **options},
        )

    def step(self, extra: Any, optimizer: Any = None) -> None:
        inputs = torch.rand(4, 3)
        loss = (self.model(inputs) - self.other(inputs)).square().mean()
        loss = loss + self.model.first.bias.sum() * float(extra)
        self.model.zero_grad()
        self.other.zero_grad()
        loss.backward()
        (optimizer or self.optimizer).step()
        self.ckpt.step()
        step = self.ckpt.progress.step
        Records.losses[step] = loss.item().hex()
        if step == Records.crash_at:
            raise CrashError


def launch(train: Train, directory: Path, crash_at: int, **options: Any) -> None:
    """One launch, which may crash."""
    Records.crash_at = crash_at
    parts = Trained(directory, **options)
    with contextlib.suppress(CrashError), parts.ckpt:
        train(parts)


def losses_of(train: Train, directory: Path, *crashes: int, **options: Any) -> dict[int, str]:
    """The losses of the logical run, by step; of each step those of its last time."""
    Records.losses = {}
    for crash in (*crashes, -1):
        launch(train, directory, crash, **options)
    return Records.losses


def sum_of(module: nn.Module | None) -> float:
    return 0.0 if module is None else sum(p.detach().sum().item() for p in module.parameters())


def the_best_model(parts: Trained) -> None:
    best = None
    for step in parts.ckpt.batches(range(NUM_STEPS), epochs=1):
        parts.step(sum_of(best))
        if step == 1:
            best = parts.other


def another_optimizer(parts: Trained) -> None:
    optimizer: Any = parts.optimizer
    for step in parts.ckpt.batches(range(NUM_STEPS), epochs=1):
        parts.step(0.5, optimizer)
        if step == 1:
            optimizer = parts.slower


def a_layer(parts: Trained) -> None:
    layer = parts.model.first
    for step in parts.ckpt.batches(range(NUM_STEPS), epochs=1):
        parts.step(sum_of(layer))
        if step == 2:
            layer = parts.other.last


def a_parameter(parts: Trained) -> None:
    weight: torch.Tensor = torch.zeros(3, 3)
    for step in parts.ckpt.batches(range(NUM_STEPS), epochs=1):
        parts.step(weight.detach().sum())
        if step == 1:
            weight = parts.other.first.weight


def in_a_dict(parts: Trained) -> None:
    used: dict[str, Any] = {"model": parts.model, "optimizer": parts.optimizer}
    for step in parts.ckpt.batches(range(NUM_STEPS), epochs=1):
        parts.step(sum_of(used["model"]), used["optimizer"])
        if step == 1:
            used.update(model=parts.other, optimizer=parts.slower)


class Team:
    """Holds the model that is used now, and those that were."""

    def __init__(self, model: nn.Module) -> None:
        self.now = model
        self.former: tuple[nn.Module, ...] = ()


def in_an_object(parts: Trained) -> None:
    team = Team(parts.model)
    for step in parts.ckpt.batches(range(NUM_STEPS), epochs=1):
        parts.step(sum_of(team.now) + sum(map(sum_of, team.former)))
        if step in (1, 2):
            team.former = (*team.former, team.now)
            team.now = parts.other.first


def in_each_epoch(parts: Trained) -> None:
    for _ in parts.ckpt.epochs(3):
        one_epoch(parts, parts.model)


def one_epoch(parts: Trained, model: nn.Module) -> None:
    for step in parts.ckpt.batches(range(3)):
        parts.step(sum_of(model))
        if step == 0:
            model = parts.other


class Scaler:
    """An object with a state of its own, which only the function of an epoch uses."""

    def __init__(self) -> None:
        self.num_calls = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_calls": self.num_calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_calls = state["num_calls"]

    def __call__(self, parts: Trained) -> None:
        self.num_calls += 1
        parts.step(0.1 * self.num_calls)


def with_a_scaler(parts: Trained) -> None:
    scaler = Scaler()
    for _ in parts.ckpt.epochs(3):
        scaled_epoch(parts, scaler)


def scaled_epoch(parts: Trained, scaler: Scaler) -> None:
    for _ in parts.ckpt.batches(range(3)):
        scaler(parts)


ALL = [
    the_best_model,
    another_optimizer,
    a_layer,
    a_parameter,
    in_a_dict,
    in_an_object,
    in_each_epoch,
    with_a_scaler,
]


@pytest.mark.parametrize("train", ALL)
@pytest.mark.parametrize("crashes", [(5,), (7, 7), (3, 5, 6)])
def test_they_are_restored(tmp_path: Path, train: Train, crashes: tuple[int, ...]) -> None:
    whole = losses_of(train, tmp_path / "whole")
    assert len(whole) == NUM_STEPS
    assert losses_of(train, tmp_path / "run", *crashes) == whole


@pytest.mark.parametrize("train", ALL)
def test_without_them_the_training_differs(tmp_path: Path, train: Train) -> None:
    whole = losses_of(train, tmp_path / "whole")
    again = losses_of(train, tmp_path / "run", 5, loop_variables="off", strict=False)
    assert again != whole


# ---------------------------------------------------------------- memory that becomes a model's


def a_view(parts: Trained) -> None:
    weight = torch.zeros(3, 3)
    for step in parts.ckpt.batches(range(NUM_STEPS), epochs=1):
        parts.step(weight.sum())
        if step == 1:
            weight = parts.other.first.weight.data


def a_former_state(parts: Trained) -> None:
    initial = copy.deepcopy(parts.model.state_dict())
    for step in parts.ckpt.batches(range(NUM_STEPS), epochs=1):
        parts.step(0.5)
        if step % 3 == 1:  # no reset but the first time: the tensors are those of the parameters
            for name, parameter in parts.model.named_parameters():
                parameter.data = initial[name]


@pytest.mark.parametrize("train", [a_view, a_former_state])
def test_a_tensor_that_becomes_memory_of_a_model_is_refused(tmp_path: Path, train: Train) -> None:
    with pytest.raises(InexactError, match="memory of a model or an optimizer"):
        losses_of(train, tmp_path)


@pytest.mark.parametrize("train", [a_view, a_former_state])
def test_with_it_a_resume_differs(tmp_path: Path, train: Train) -> None:
    whole = losses_of(train, tmp_path / "whole", strict=False)
    assert losses_of(train, tmp_path / "run", 6, strict=False) != whole


def test_a_view_that_the_script_makes_is_no_line(tmp_path: Path) -> None:
    def train(parts: Trained) -> None:
        weights = [each.data for each in parts.model.parameters()]
        first = parts.other.first.weight.data
        for _ in parts.ckpt.batches(range(NUM_STEPS), epochs=1):
            parts.step(sum(each.sum() for each in weights) + first.sum())

    whole = losses_of(train, tmp_path / "whole")
    assert losses_of(train, tmp_path / "run", 5) == whole
