"""Runs that were stopped and resumed in this process, as every test of a report needs them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer

Train = Callable[..., None]


class StopError(Exception):
    """Ends a launch without a save."""


def _train(directory: Path, *, until: int = 0, seed: int = 0, with_loss: bool = True) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = TensorDataset(torch.randn(24, 6), torch.arange(24) % 3)
    checkpointer = Checkpointer(directory, model=model, optimizer=optimizer, save_every=4)
    try:
        with checkpointer:
            loader = DataLoader(data, 4, shuffle=True)
            for inputs, labels in checkpointer.batches(loader, epochs=4):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                checkpointer.step(loss=loss if with_loss else None)
                if checkpointer.progress.step == until:
                    raise StopError
    except StopError:
        pass


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch) -> Train:
    """One launch of a run: 24 steps, saved each 4, until a step at which it stops."""
    # The program of a test worker has no file, and nothing equals what ran in a shell before.
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    return _train


@pytest.fixture
def stopped_twice(train: Train, tmp_path: Path) -> Path:
    """A finished run with three attempts, stopped after the steps 7 and 14."""
    directory = tmp_path / "run"
    for until in (7, 14, 0):
        train(directory, until=until)
    return directory
