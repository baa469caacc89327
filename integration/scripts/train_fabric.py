"""Handwritten digits with Lightning Fabric and the Checkpointer of plain PyTorch.

Fabric moves the model and the batches to the device, and takes the backward pass. The Checkpointer
takes the module and the optimizer that were given to ``fabric.setup``, and the loader itself: with
several ranks one that has a ``DistributedSampler``.
"""

from __future__ import annotations

import argparse
import os

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumekit.adapters.torch import Checkpointer


def train(directory: str, *, epochs: int = 2, save_every: int = 10) -> None:
    fabric = Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")))
    fabric.launch()
    fabric.seed_everything(fabric.global_rank)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    replicas = {"num_replicas": fabric.world_size, "rank": fabric.global_rank}
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data, **replicas))
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(module, adamw)

    checkpointer = Checkpointer(directory, model=module, optimizer=adamw, save_every=save_every)
    for batch in checkpointer.batches(loader, epochs=epochs):
        inputs, targets = fabric.to_device(batch)
        loss = nn.functional.cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(loss=loss)
    checkpointer.close()
    if fabric.world_size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="runs/digits")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()
    train(arguments.directory, epochs=arguments.epochs, save_every=arguments.save_every)
