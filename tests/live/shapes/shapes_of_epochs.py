"""Shapes of loaders that training rebinds or recreates, and of epochs without batches."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from tiny_training import BATCHES, EPOCHS, loss_of, make, step
from torch.utils.data import DataLoader

from resumekit.adapters.torch import Checkpointer


def train_on(ckpt, model, optimizer, batch, other, record, factor=3.0):
    """One step on a batch and on one of a second loader; gives the next factor."""
    loss = loss_of(model, batch) + factor * loss_of(model, other)
    step(ckpt, optimizer, loss)
    record(loss, model)
    return 0.7 * factor + 0.3 * loss.item()


def two_loaders(dataset):
    """One that shuffles the second half of a dataset, one that shuffles the first."""
    half = len(dataset) // 2
    first, second = (torch.utils.data.Subset(dataset, range(n, n + half)) for n in (0, half))
    return DataLoader(second, 4, shuffle=True), DataLoader(first, 4, shuffle=True)


# ---------------------------------------------------------------- a second loader that is rebound


def loader_rebound_in_the_loop(directory, *, record, **options):
    """The second loader is replaced by another one at step 2."""
    model, optimizer, loader = make()
    easy, hard = two_loaders(loader.dataset)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    source = ckpt.batches(easy, name="easy", repeat=True)
    batches = ckpt.batches(loader, epochs=EPOCHS)
    for index, batch in enumerate(batches, start=batches.initial):
        if index == 1:
            source = ckpt.batches(hard, name="hard", repeat=True)
        train_on(ckpt, model, optimizer, batch, next(source), record)


def loader_rebound_in_an_attribute(directory, *, record, **options):
    """The same, of an attribute."""
    model, optimizer, loader = make()
    easy, hard = two_loaders(loader.dataset)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    data = SimpleNamespace(source=ckpt.batches(easy, name="easy", repeat=True))
    batches = ckpt.batches(loader, epochs=EPOCHS)
    for index, batch in enumerate(batches, start=batches.initial):
        if index == 1:
            data.source = ckpt.batches(hard, name="hard", repeat=True)
        train_on(ckpt, model, optimizer, batch, next(data.source), record)


def loader_rebound_in_a_list(directory, *, record, **options):
    """The same, of an item."""
    model, optimizer, loader = make()
    easy, hard = two_loaders(loader.dataset)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    sources = [ckpt.batches(easy, name="easy", repeat=True)]
    batches = ckpt.batches(loader, epochs=EPOCHS)
    for index, batch in enumerate(batches, start=batches.initial):
        if index == 1:
            sources[0] = ckpt.batches(hard, name="hard", repeat=True)
        train_on(ckpt, model, optimizer, batch, next(sources[0]), record)


def loader_rebound_in_an_epoch(directory, *, record, **options):
    """The same, inside an epoch."""
    model, optimizer, loader = make()
    easy, hard = two_loaders(loader.dataset)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    source = ckpt.batches(easy, name="easy", repeat=True)
    for _ in ckpt.epochs(EPOCHS):
        batches = ckpt.batches(loader)
        for index, batch in enumerate(batches, start=batches.initial):
            if index == 1:
                source = ckpt.batches(hard, name="hard", repeat=True)
            train_on(ckpt, model, optimizer, batch, next(source), record)


def loader_rebound_in_the_second_epoch(directory, *, record, **options):
    """The same, by code before the second epoch's first batch, which the third one does not run."""
    model, optimizer, loader = make()
    easy, hard = two_loaders(loader.dataset)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    source = ckpt.batches(easy, name="easy", repeat=True)
    for epoch in ckpt.epochs(EPOCHS):
        if epoch == 1:
            source = ckpt.batches(hard, name="hard", repeat=True)
        for batch in ckpt.batches(loader):
            train_on(ckpt, model, optimizer, batch, next(source), record)


def loader_added_in_the_loop(directory, *, record, **options):
    """The second loader is first used at step 2."""
    model, optimizer, loader = make()
    easy, _ = two_loaders(loader.dataset)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    source = None
    batches = ckpt.batches(loader, epochs=EPOCHS)
    for index, batch in enumerate(batches, start=batches.initial):
        if index == 1:
            source = ckpt.batches(easy, name="easy", repeat=True)
        train_on(ckpt, model, optimizer, batch, batch if source is None else next(source), record)


def loader_chosen_by_a_number(directory, *, record, **options):
    """All loops are created before training; a plain variable chooses one."""
    model, optimizer, loader = make()
    factor = 3.0
    easy, hard = two_loaders(loader.dataset)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    sources = [ckpt.batches(each, name=f"{n}", repeat=True) for n, each in enumerate((easy, hard))]
    stage = 0
    batches = ckpt.batches(loader, epochs=EPOCHS)
    for index, batch in enumerate(batches, start=batches.initial):
        if index == 1:
            stage = 1
        factor = train_on(ckpt, model, optimizer, batch, next(sources[stage]), record, factor)


def loader_chosen_in_each_epoch(directory, *, record, **options):
    """Each epoch binds the variable to one of two loops, before its first batch."""
    model, optimizer, loader = make()
    factor = 3.0
    easy, hard = two_loaders(loader.dataset)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    sources = {
        "easy": ckpt.batches(easy, name="easy", repeat=True),
        "hard": ckpt.batches(hard, name="hard", repeat=True),
    }
    for epoch in ckpt.epochs(EPOCHS):
        source = sources["hard" if epoch else "easy"]
        for batch in ckpt.batches(loader):
            factor = train_on(ckpt, model, optimizer, batch, next(source), record, factor)


# ---------------------------------------------------------------- one that is recreated


def loader_recreated_in_each_epoch(directory, *, record, **options):
    """Each epoch recreates both loaders under their names, as where the data are split again."""
    model, optimizer, loader = make()
    factor = 3.0
    dataset = loader.dataset
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in ckpt.epochs(EPOCHS):
        rest = torch.utils.data.Subset(dataset, range(epoch, 10 + 3 * epoch))
        other = ckpt.batches(DataLoader(rest, 4, shuffle=True), name="other", repeat=True)
        for batch in ckpt.batches(DataLoader(dataset, 4, shuffle=True)):
            factor = train_on(ckpt, model, optimizer, batch, next(other), record, factor)


def loader_with_a_generator_recreated(directory, *, record, **options):
    """The same, of loaders with generators of their own; one is not drawn from in each step."""
    model, optimizer, loader = make()
    factor = 3.0
    dataset = loader.dataset
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in ckpt.epochs(EPOCHS):
        generator = torch.Generator().manual_seed(epoch)
        rest = DataLoader(dataset, 3 + epoch, shuffle=True, generator=generator)
        other = ckpt.batches(rest, name="other", repeat=True)
        batches = ckpt.batches(loader)
        for index, batch in enumerate(batches, start=batches.initial):
            second = next(other) if index % 3 == 2 else batch
            factor = train_on(ckpt, model, optimizer, batch, second, record, factor)


def loader_kept_through_the_epochs(directory, *, record, **options):
    """Each epoch asks for the same second loader again, which is not at its start."""
    model, optimizer, loader = make()
    factor = 3.0
    easy, _ = two_loaders(loader.dataset)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS):
        other = ckpt.batches(easy, name="other", repeat=True)
        for batch in ckpt.batches(loader):
            factor = train_on(ckpt, model, optimizer, batch, next(other), record, factor)


# ---------------------------------------------------------------- epochs without batches


def epochs_on_the_whole_data(directory, *, record, **options):
    """One optimizer step on all samples in each epoch; nothing marks it."""
    model, optimizer, loader = make()
    data, scale = loader.dataset[:], 1.0
    ckpt = Checkpointer(directory, **options)
    for _ in ckpt.epochs(EPOCHS * BATCHES):
        loss = scale * loss_of(model, data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scale = 0.7 * scale + 0.3 * loss.item()
        record(loss, model)


def epochs_on_the_whole_data_with_step(directory, *, record, **options):
    """The same, marked by ``step()``."""
    model, optimizer, loader = make()
    data, scale = loader.dataset[:], 1.0
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS * BATCHES):
        loss = scale * loss_of(model, data)
        step(ckpt, optimizer, loss)
        scale = 0.7 * scale + 0.3 * loss.item()
        record(loss, model)


def epochs_without_an_optimizer(directory, *, record, **options):
    """The weights are changed by hand; the model is given, and ``step()`` marks the steps."""
    model, _, loader = make()
    data, scale = loader.dataset[:], 1.0
    ckpt = Checkpointer(directory, model=model, **options)
    for _ in ckpt.epochs(EPOCHS * BATCHES):
        loss, weights = scale * loss_of(model, data), [*model.parameters()]
        for each, grad in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            each.data.add_(grad, alpha=-0.05)
        scale = 0.7 * scale + 0.3 * loss.item()
        ckpt.step(loss=loss)
        record(loss, model)


def optimizer_made_in_each_epoch(directory, *, record, **options):
    """Each epoch makes its optimizer; the model is given, and ``step()`` marks the steps."""
    model, _, loader = make()
    ckpt = Checkpointer(directory, model=model, **options)
    scale = 1.0
    for epoch in ckpt.epochs(EPOCHS * BATCHES):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05 / (1 + epoch))
        for _ in range(2):
            optimizer.zero_grad()
            loss = scale * loss_of(model, loader.dataset[:])
            loss.backward()
            optimizer.step()
        scale = 0.7 * scale + 0.3 * loss.item()
        ckpt.step(loss=loss)
        record(loss, model)
