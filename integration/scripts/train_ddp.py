"""Handwritten digits under DDP: a stock script, plus the Checkpointer's lines.

torchrun --nproc_per_node=2 train_ddp.py
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumekit.adapters.torch import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="runs/digits-ddp")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    init_process_group("gloo")
    torch.manual_seed(get_rank())  # the ranks draw different dropout masks
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16,
        torch.tensor(digits.target),
    )
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))

    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(64, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(64, 10),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, T_max=arguments.epochs * len(loader)
    )

    checkpointer = Checkpointer(
        arguments.directory,
        model=model,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        save_every=10,
    )
    for inputs, targets in checkpointer.batches(loader, epochs=arguments.epochs):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        checkpointer.step(loss=loss)

    checkpointer.close()
    destroy_process_group()


if __name__ == "__main__":
    main()
