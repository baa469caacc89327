"""A test file as it stands on the page; pytest runs one of the tests that the class inherits."""

import os
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer


def train(directory, *, save_every, ema=False, report=False, workers=0) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8))
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    average = torch.optim.swa_utils.AveragedModel(model) if ema else None
    best = {"best_metric": "eval_loss", "mode": "min"} if report else {}
    ckpt = Checkpointer(
        directory, model=model, optimizer=optimizer, ema=average, save_every=save_every, **best
    )
    for (x,) in ckpt.batches(loader, epochs=2):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if average:
            average.update_parameters(model)
        ckpt.step(loss=loss)
        if report and ckpt.progress.step % 4 == 0:
            ckpt.report(eval_loss=float(loss))


...  # fragment 1

if __name__ == "__main__":
    # A mid-epoch kill with both ways to feed, and a component that is left out.
    chosen = ["-k", "every_way and mid or left_out and optimizer"]
    command = [os.path.abspath(__file__), "-q", "-p", "no:cacheprovider", *chosen]
    sys.exit(pytest.main(command))
