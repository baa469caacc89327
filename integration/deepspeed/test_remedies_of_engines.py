"""The remedies for engines of DeepSpeed, followed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from followed_remedies import Remedy
from one_rank import DEPRECATIONS, one_rank
from preloads import DEEPSPEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("deepspeed")

import deepspeed
from deepspeed_workloads import LoadsItself

from resumekit.adapters.deepspeed import Checkpointer
from resumekit.adapters.torch import Checkpointer as PlainCheckpointer

PRELOAD = DEEPSPEED
NUM_BATCHES = 4

pytestmark = [pytest.mark.usefixtures("_rank"), *DEPRECATIONS]


@pytest.fixture(scope="module")
def _rank() -> Iterator[None]:
    """This process is the only rank of a job."""
    with one_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        yield


class Net(nn.Module):
    """One layer, and one that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(3, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.used(batch).square().mean()  # type: ignore[no-any-return]


Kind = Callable[..., torch.optim.Optimizer]


def make_engine(stage: int, kind: Kind = torch.optim.AdamW) -> Any:
    torch.manual_seed(0)
    model = Net()
    return deepspeed.initialize(
        model=model,
        optimizer=kind(model.parameters(), lr=1e-2),
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )[0]


class Plain:
    """The calls of an engine, for a model without DeepSpeed."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = Net()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        return self.module(batch)  # type: ignore[no-any-return]

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def train(directory: Path, engine: Any, *, leave_after: int = NUM_BATCHES, **options: Any) -> int:
    """The last step; a launch may leave before the end."""
    loader = DataLoader(TensorDataset(torch.arange(32.0).view(8, 4) / 32), batch_size=2)
    engines = engine.values() if isinstance(engine, dict) else [engine]
    given: dict[str, Any] = {"save_every": 1, **options}
    if isinstance(engine, Plain):
        given |= {"model": engine.module, "optimizer": engine.optimizer}
        checkpointer: Any = PlainCheckpointer(directory, **given)
    else:
        checkpointer = Checkpointer(engine, directory, **given)
    with checkpointer:
        for (batch,) in checkpointer.batches(loader, epochs=1):
            for each in engines:
                each.backward(each(batch))
                each.step()
            checkpointer.step()
            if checkpointer.progress.step == leave_after:
                break
        return int(checkpointer.progress.step)


def weights(engine: Any) -> list[float]:
    return [each.item() for tensor in engine.module.parameters() for each in tensor.flatten()]


@pytest.mark.remedy("Start with the configuration of the checkpoint")
def test_an_engine_has_the_configuration_of_the_checkpoint(tmp_path: Path, remedy: Remedy) -> None:
    whole = make_engine(1, LoadsItself)
    train(tmp_path / "whole", whole)
    train(tmp_path / "a", make_engine(1, LoadsItself), leave_after=2)
    remedy.of(train, tmp_path / "a", make_engine(2, LoadsItself))
    again = make_engine(1, LoadsItself)
    assert train(tmp_path / "a", again) == NUM_BATCHES
    assert weights(again) == weights(whole)


@pytest.mark.remedy("Pass exclude={{}} to start it afresh")
def test_an_optimizer_with_uneven_steps_starts_afresh(tmp_path: Path, remedy: Remedy) -> None:
    train(tmp_path, Plain(), leave_after=2)
    text = remedy.of(train, tmp_path, make_engine(1))
    name, value = re.findall(r"(\w+)=(\{.*?\})", text)[0]
    assert train(tmp_path, make_engine(1), **{name: ast.literal_eval(value)}) == NUM_BATCHES


@pytest.mark.remedy('Pass {"first": ..., "second": ...}')
def test_several_engines_have_names(tmp_path: Path, remedy: Remedy) -> None:
    text = remedy.of(train, tmp_path, [make_engine(0), make_engine(2)])
    names = re.findall(r'"(\w+)":', text)

    def named() -> dict[str, Any]:
        return dict(zip(names, (make_engine(0), make_engine(2)), strict=True))

    assert train(tmp_path, named(), leave_after=2) == 2
    assert train(tmp_path, named()) == NUM_BATCHES
