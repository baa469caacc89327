"""What the frames share: a small training that records its losses and stops its first launch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LAUNCH = int(os.environ.get("FRAME_LAUNCH", "0"))  # 0 is uninterrupted, 1 is stopped, 2 continues


def records() -> Path:
    """The file of what this rank records in this launch."""
    return Path(f"records-{LAUNCH}-{os.environ.get('RANK', '0')}.txt")


def record(value: torch.Tensor | float) -> None:
    """Adds a line, which a kill does not lose."""
    with records().open("a", encoding="utf-8") as file:
        file.write(f"{float(torch.as_tensor(value).detach()).hex()}\n")


def num_recorded() -> int:
    """The lines of this launch."""
    return len(records().read_text(encoding="utf-8").splitlines())


def stop_first_launch(after: int = 10, number: int = signal.SIGTERM) -> None:
    """Sends this process a signal in its first launch, once it has recorded so much."""
    if LAUNCH == 1 and num_recorded() == after:
        os.kill(os.getpid(), number)


def objects(num_batches: int = 16) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """A model with a dropout, its optimizer, and a shuffled loader."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4 * num_batches, 8))
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, DataLoader(data, batch_size=4, shuffle=True)


def step_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, **stop: int
) -> Callable[..., torch.Tensor]:
    """The function that trains one step, records the loss, and returns it.

    Args:
        model: maps 8 values to 8.
        optimizer: of its parameters.
        stop: when and by what the first launch is stopped.
    """

    def train_on(batch: Any) -> torch.Tensor:
        (x,) = batch
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(loss)
        stop_first_launch(**stop)
        return loss

    return train_on
