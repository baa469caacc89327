"""Handwritten digits with Accelerate: its plain twin and four lines of a Checkpointer."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.accelerate import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="runs/digits")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()

    set_seed(0)
    accelerator = Accelerator()
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=arguments.epochs * len(loader)
    )
    model, optimizer, loader, lr_scheduler = accelerator.prepare(
        model, optimizer, loader, lr_scheduler
    )
    ema = torch.optim.swa_utils.AveragedModel(
        accelerator.unwrap_model(model),
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99),
    )

    ckpt = Checkpointer(accelerator, arguments.directory, ema=ema, save_every=arguments.save_every)
    for epoch in ckpt.epochs(arguments.epochs):
        for inputs, targets in ckpt.batches(loader):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            ema.update_parameters(accelerator.unwrap_model(model))
            ckpt.step(loss=loss)
        outputs = ema.eval()(images.to(accelerator.device)).cpu()
        accuracy = (outputs.argmax(1) == labels).float().mean().item()
        accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f}, last loss {loss.item()}")


if __name__ == "__main__":
    main()
