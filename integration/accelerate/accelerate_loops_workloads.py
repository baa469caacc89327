"""Training functions on Accelerate whose loops are written as its own examples write them."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from digits import Digits
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim import AdamW
from torch.utils.data import DataLoader

from resumekit.adapters.accelerate import Checkpointer

NUM_SAMPLES = 92  # the last batch of an epoch is a partial one
BATCH_SIZE = 8


def shuffled(num_samples: int = NUM_SAMPLES) -> Any:
    return DataLoader(Digits(num_samples, augment=True), batch_size=BATCH_SIZE, shuffle=True)


def train(
    directory: str,
    *,
    seedable: bool = False,
    new_loaders: bool = False,
    evaluates: int = 0,
    epochs: int = 3,
    save_every: int = 3,
) -> None:
    """Trains a small classifier.

    Args:
        directory: the run directory.
        seedable: whether Accelerate's own sampler shuffles.
        new_loaders: whether each epoch prepares a loader of its own, of fewer samples.
        evaluates: batches of another loader that shuffles, with which each epoch ends.
        epochs: of the run.
        save_every: steps between saves.
    """
    set_seed(0)
    configuration = DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    model: Any = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10))
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader, validation = accelerator.prepare(
        model, optimizer, shuffled(), shuffled(64)
    )
    extras = {"evaluated": 0.0}
    checkpointer = Checkpointer(
        accelerator, directory, extras=extras, save_every=save_every, strict=True
    )
    for epoch in checkpointer.epochs(epochs):
        if new_loaders:
            loader = accelerator.prepare(shuffled(NUM_SAMPLES - 8 * epoch))
        for images, labels in checkpointer.batches(loader):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(loss=loss)
        if evaluates:
            extras["evaluated"] += some_of(accelerator, model, validation, evaluates)
    checkpointer.close()


def accumulated(directory: str, *, grows: bool = False) -> None:
    """Clears gradients at the top of the loop, and saves inside accumulation windows.

    Args:
        directory: the run directory.
        grows: whether the accumulation window grows in training.
    """
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if grows else 4)
    model: Any = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10))
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, shuffled())
    checkpointer = Checkpointer(
        accelerator, directory, save_every=None, mid_accumulation="gradients", strict=True
    )
    for number, (images, labels) in enumerate(checkpointer.batches(loader, epochs=3)):
        optimizer.zero_grad()
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            checkpointer.step(loss=loss)
        if grows and number == 5:
            accelerator.gradient_accumulation_steps = 3
        if number % 7 == 5:
            checkpointer.save()
    checkpointer.close()


def joined(directory: str, *, num_samples: int) -> None:
    """Ranks that may have unlike numbers of batches.

    accelerate 1.15 accelerator.py: ``join_uneven_inputs`` is this ``Join``, but not on the CPU.
    """
    set_seed(0)
    configuration = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    model: Any = nn.Linear(64, 10)
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, shuffled(num_samples))
    checkpointer = Checkpointer(accelerator, directory, save_every=1)
    for _ in checkpointer.epochs(2):
        with Join([model]):
            for images, labels in checkpointer.batches(loader):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step(loss=loss)
    checkpointer.close()


def some_of(accelerator: Any, model: Any, validation: Any, num_batches: int) -> float:
    """The loss of its first batches."""
    model.eval()
    losses = []
    for number, (images, labels) in enumerate(validation, start=1):
        with torch.no_grad():
            outputs, targets = accelerator.gather_for_metrics((model(images), labels))
        losses.append(nn.functional.cross_entropy(outputs, targets).item())
        if number == num_batches:
            break
    model.train()
    return sum(losses)
