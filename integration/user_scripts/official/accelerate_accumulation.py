"""Gradient accumulation, after Accelerate's ``by_feature/gradient_accumulation.py``.

Checkpoints are named by Accelerate after each epoch, as in its guide to checkpoints. Its own
resume: ``load_state`` with the newest of them.
"""

from __future__ import annotations

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from small_data import NUM_CLASSES, images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def training_function(args):
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        project_config=ProjectConfiguration(
            project_dir=args.project_dir, automatic_checkpoint_naming=True
        ),
    )
    set_seed(42)
    train_dataloader = DataLoader(
        TensorDataset(*images(64)), shuffle=True, batch_size=args.batch_size
    )
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, NUM_CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, lr_scheduler
    )
    accelerator.register_for_checkpointing(lr_scheduler)

    starting_epoch = 0
    checkpoints = os.path.join(args.project_dir, "checkpoints")
    if os.path.isdir(checkpoints):
        starting_epoch = len(os.listdir(checkpoints))
        accelerator.load_state()
        accelerator.project_configuration.iteration = starting_epoch

    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        for inputs, targets in train_dataloader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: last loss {loss.item():.3f}")
        accelerator.save_state()
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--project_dir", default=".")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_epochs", type=int, default=5)
    parser.add_argument("--batch_size", type=int, default=8)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
