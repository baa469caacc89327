"""Handwritten digits with plain PyTorch, as people write it; ``train_torch.py`` is its twin.

The resume follows PyTorch's tutorial on general checkpoints: one file with all that has a
``state_dict`` (here the averaged weights too), plain values, and the step; in an interrupted epoch
the batches that were used are passed over. The line with ``resumekit.trace`` lets the judge look
on, and does nothing without it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import resumekit


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

    path = Path(arguments.directory) / "checkpoint.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    step = 0
    if path.exists():
        checkpoint = torch.load(path, weights_only=True)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
        lr_scheduler.load_state_dict(checkpoint["lr_scheduler_state_dict"])
        ema.load_state_dict(checkpoint["ema_state_dict"])
        curriculum = checkpoint["curriculum"]
        step = checkpoint["step"]

    for epoch in range(step // len(loader), arguments.epochs):
        for index, (inputs, targets) in enumerate(loader):
            if epoch * len(loader) + index < step:
                continue
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lr_scheduler.step()
            ema.update_parameters(model)
            curriculum["hardest_loss"] = max(curriculum["hardest_loss"], loss.item())
            step += 1
            resumekit.trace(
                step, samples=inputs, loss=loss, model=model, optimizer=optimizer, ema=ema
            )
            if step % arguments.save_every == 0:
                checkpoint = {
                    "step": step,
                    "model_state_dict": model.state_dict(),
                    "optimizer_state_dict": optimizer.state_dict(),
                    "lr_scheduler_state_dict": lr_scheduler.state_dict(),
                    "ema_state_dict": ema.state_dict(),
                    "curriculum": curriculum,
                }
                torch.save(checkpoint, path)
        model.eval()
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
        model.train()
        print(f"epoch {epoch}: accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
