"""Shapes whose data is chosen by code that runs between ``epochs()`` and the first batch."""

from __future__ import annotations

import numpy as np
import torch
from tiny_training import BATCH_SIZE, EPOCHS, loss_of, make, step
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler

from resumekit.adapters.torch import Checkpointer


def losses_of(model, data):
    """The loss of each sample, by the model as it is."""
    inputs, targets = data.tensors
    with torch.no_grad():
        return mse_loss(model(inputs), targets[:, :1], reduction="none").view(-1)


def chosen(build):
    """A shape that builds its loader in each epoch.

    Args:
        build: makes it, of the model and the dataset.
    """

    def train(directory, *, record, **options):
        model, optimizer, loader = make()
        data = loader.dataset
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        for _ in ckpt.epochs(EPOCHS):
            for batch in ckpt.batches(build(model, data)):
                loss = loss_of(model, batch)
                step(ckpt, optimizer, loss)
                record(loss, model)

    return train


def hardest(model, data):
    """The indices of the samples with the largest loss, enough for seven batches."""
    return [*losses_of(model, data).topk(7 * BATCH_SIZE - 4).indices.tolist(), 0, 1, 2, 3]


subset_drawn_at_random = chosen(
    lambda model, data: DataLoader(Subset(data, torch.randperm(28).tolist()), BATCH_SIZE)
)
subset_of_the_hardest = chosen(
    lambda model, data: DataLoader(Subset(data, hardest(model, data)), BATCH_SIZE, shuffle=True)
)
tensors_of_the_hardest = chosen(
    lambda model, data: DataLoader(
        TensorDataset(*(each[hardest(model, data)] for each in data.tensors)), BATCH_SIZE
    )
)
samples_by_their_losses = chosen(
    lambda model, data: DataLoader(
        data, BATCH_SIZE, sampler=WeightedRandomSampler(losses_of(model, data), 28)
    )
)


def subset_that_shrinks(directory, *, record, **options):
    """As many samples as have a loss above the mean: another number in each epoch."""
    model, optimizer, loader = make()
    data = loader.dataset
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS):
        losses = losses_of(model, data)
        large = (losses > losses.mean()).nonzero().view(-1).tolist()
        loader = DataLoader(Subset(data, large), 1, shuffle=True)
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            record(loss, model)


class Weighted(TensorDataset):
    """Samples with factors that are drawn again in each epoch, and summed over the epochs."""

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.factors, self.total = [1.0] * len(self), 0.0

    def draw(self):
        """New factors."""
        self.factors = np.random.uniform(0.5, 1.5, len(self)).tolist()
        self.total += sum(self.factors)

    def __getitem__(self, index):
        """The sample, with its factor."""
        inputs, targets = super().__getitem__(index)
        return inputs * self.factors[index], targets + self.total % 1


def factors_of_each_epoch(directory, *, record, **options):
    """The first line of an epoch changes the dataset of a loader that was made before."""
    model, optimizer, loader = make()
    data = Weighted(*loader.dataset.tensors)
    loader = DataLoader(data, BATCH_SIZE, shuffle=True)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS):
        data.draw()
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            record(loss, model)


def order_drawn_by_the_script(directory, *, record, **options):
    """The loop goes over indices that NumPy has shuffled."""
    model, optimizer, loader = make()
    samples = list(loader)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS):
        for index in ckpt.batches(np.random.permutation(len(samples))):
            loss = loss_of(model, samples[index])
            step(ckpt, optimizer, loss)
            record(loss, model)


def loader_of_each_stage(directory, *, record, **options):
    """A list of loaders that the script makes; each epoch goes over its own one."""
    model, optimizer, first = make()
    stages = [first, *(DataLoader(first.dataset, BATCH_SIZE, shuffle=True) for _ in range(2))]
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in ckpt.epochs(EPOCHS):
        for batch in ckpt.batches(stages[epoch]):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            record(loss, model)
