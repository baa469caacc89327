"""Handwritten digits with plain PyTorch: ``stock_torch.py`` with the Checkpointer's lines."""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="runs/digits")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=arguments.epochs * len(loader)
    )
    ema = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )

    curriculum = {"hardest_loss": 0.0}

    checkpointer = Checkpointer(
        arguments.directory,
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        ema=ema,
        extras=curriculum,
        save_every=arguments.save_every,
        best_metric="accuracy",
        mode="max",
    )
    for epoch in checkpointer.epochs(arguments.epochs):
        for inputs, targets in checkpointer.batches(loader):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            ema.update_parameters(model)
            curriculum["hardest_loss"] = max(curriculum["hardest_loss"], loss.item())
            checkpointer.step(loss=loss)
        model.eval()
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
        model.train()
        checkpointer.report(accuracy=accuracy)
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
