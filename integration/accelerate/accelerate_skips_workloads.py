"""A training function that skips the batches of an interrupted epoch itself.

As Accelerate's ``complete_nlp_example.py`` does: by ``skip_first_batches``, in the first epoch of a
launch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from digits import Digits
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, IterableDataset

from resumekit.adapters.accelerate import Checkpointer

NUM_SAMPLES = 92  # the last batch of an epoch is a partial one
BATCH_SIZE = 8


class Stream(IterableDataset[tuple[torch.Tensor, int]]):
    """The digits as they come, each with noise of its own."""

    def __init__(self) -> None:
        self.digits = Digits(NUM_SAMPLES, augment=True)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        begin = random.randrange(NUM_SAMPLES)
        return (self.digits[(begin + index) % NUM_SAMPLES] for index in range(NUM_SAMPLES))


def make_loader(data: str) -> DataLoader[Any]:
    """A loader before it is prepared."""
    if data == "stream":
        return DataLoader(Stream(), batch_size=BATCH_SIZE)
    return DataLoader(Digits(NUM_SAMPLES, augment=True), batch_size=BATCH_SIZE, shuffle=True)


def train(
    directory: str,
    *,
    data: str = "map",
    dispatch: bool | None = None,
    stateful: bool = False,
    seedable: bool = False,
    surplus: int = 0,
    epochs: int = 3,
    save_every: int = 4,
) -> None:
    """Trains a small classifier.

    Args:
        directory: the run directory.
        data: ``map`` or ``stream``.
        dispatch: whether one rank reads for all; None as Accelerate decides.
        stateful: whether loaders are those of torchdata.
        seedable: whether Accelerate's own sampler shuffles.
        surplus: how many batches too many are skipped.
        epochs: of the run.
        save_every: steps between saves.
    """
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        dataloader_config=DataLoaderConfiguration(
            dispatch_batches=dispatch,
            use_seedable_sampler=seedable,
            use_stateful_dataloader=stateful,
        ),
    )
    model: Any = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10))
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader, validation = accelerator.prepare(
        model, optimizer, make_loader(data), make_loader("map")
    )
    checkpointer = Checkpointer(accelerator, directory, save_every=save_every, strict=True)
    steps_per_epoch = -(-NUM_SAMPLES // (BATCH_SIZE * accelerator.num_processes))
    starting_epoch, resume_step = divmod(checkpointer.resume().step, steps_per_epoch)
    for epoch in checkpointer.epochs(epochs):
        active = loader
        if epoch == starting_epoch:
            active = accelerator.skip_first_batches(loader, resume_step + surplus)
        for images, labels in checkpointer.batches(active):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(loss=loss)
        next(iter(validation))  # it has an order of its own
    checkpointer.close()
