"""Shapes of the loop itself: how the batches are asked for, and what is carried around the loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools

import numpy as np
import torch
from tiny_training import BATCHES, EPOCHS, loss_of, make, run_as_script, step
from torch.utils.data import DataLoader
from tqdm import tqdm

from resumekit.adapters.torch import Checkpointer


def train_on(ckpt, model, optimizer, batch, factor, record):
    """One step with a scaled loss; gives the loss."""
    loss = factor * loss_of(model, batch)
    step(ckpt, optimizer, loss)
    record(loss, model)
    return loss.item()


# ---------------------------------------------------------------- asking for batches


def while_loop_with_next(directory, *, record, **options):
    """``while True`` with ``next(iterator)``."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    batches, scale = iter(ckpt.batches(loader, epochs=EPOCHS)), 1.0
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            break
        scale = 0.7 * scale + 0.3 * train_on(ckpt, model, optimizer, batch, scale, record)


def while_loop_with_walrus(directory, *, record, **options):
    """``while (batch := next(iterator, None)) is not None``."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    batches, scale = iter(ckpt.batches(loader, epochs=EPOCHS)), 1.0
    while (batch := next(batches, None)) is not None:
        scale = 0.7 * scale + 0.3 * train_on(ckpt, model, optimizer, batch, scale, record)


def progress_bar(directory, *, record, **options):
    """tqdm around the batches."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    scale = 1.0
    for batch in tqdm(ckpt.batches(loader, epochs=EPOCHS)):
        scale = 0.7 * scale + 0.3 * train_on(ckpt, model, optimizer, batch, scale, record)


def count_in_a_bar(directory, *, record, **options):
    """A progress bar is around the count."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS):
        for index, batch in tqdm(enumerate(ckpt.batches(loader)), disable=True):
            train_on(ckpt, model, optimizer, batch, 0.5 + index / 21, record)


def count_in_a_variable(directory, *, record, **options):
    """The same, of which a variable holds the bar."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS):
        bar = tqdm(enumerate(ckpt.batches(loader)), disable=True)
        for index, batch in bar:
            train_on(ckpt, model, optimizer, batch, 0.5 + index / 21, record)


def count_of_enumerate(directory, *, record, **options):
    """The count of ``enumerate``, which no variable has, scales the loss."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for index, batch in enumerate(ckpt.batches(loader, epochs=EPOCHS)):
        train_on(ckpt, model, optimizer, batch, 0.5 + index / 21, record)


class History:
    """Keeps what a loop logs."""

    def __init__(self):
        self.rows = []

    def log(self, index, loss):
        self.rows.append((index, loss))


def count_kept_by_a_method_named_log(directory, *, record, **options):
    """The count of ``enumerate`` reaches an object of the script, which scales the loss by it."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    history = History()
    for index, batch in enumerate(ckpt.batches(loader, epochs=EPOCHS)):
        factor = 0.5 + sum(number for number, _ in history.rows) / 210
        history.log(index, train_on(ckpt, model, optimizer, batch, factor, record))


def count_next_to_an_absolute_one(directory, *, record, **options):
    """Of two loops only the second begins its count at the position."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS):
        for index, batch in enumerate(ckpt.batches(loader, name="first")):
            train_on(ckpt, model, optimizer, batch, 0.5 + index / 21, record)
        second = ckpt.batches(loader, name="second")
        for index, batch in enumerate(second, start=second.initial):
            train_on(ckpt, model, optimizer, batch, 0.5 + index / 21, record)


def count_of_epochs_and_of_batches(directory, *, record, **options):
    """Epochs and batches are counted; in each epoch the count of the batches begins again."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for number, _ in enumerate(ckpt.epochs(EPOCHS), 1):
        for index, batch in enumerate(tqdm(ckpt.batches(loader), disable=True)):
            train_on(ckpt, model, optimizer, batch, 0.3 * number + index / 21, record)


def count_of_zip(directory, *, record, **options):
    """The batches are zipped with an endless count."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch, index in zip(ckpt.batches(loader, epochs=EPOCHS), itertools.count()):
        train_on(ckpt, model, optimizer, batch, 0.5 + index / 21, record)


def with_previous(batches):
    """Each batch with the one before."""
    previous = None
    for batch in batches:
        yield batch, previous or batch
        previous = batch


def generator_that_keeps_the_previous_batch(directory, *, record, **options):
    """A generator of the script gives each batch with the one before, which is mixed in."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    batches = ckpt.batches(loader, epochs=EPOCHS)
    for (inputs, targets), (before, _) in with_previous(batches):
        train_on(ckpt, model, optimizer, (inputs + before, targets), 1.0, record)


def generator_that_iterates_over_the_epochs(directory, *, record, **options):
    """A generator of the script iterates over the loader again and again, with its factor."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)

    def cycle():
        factor = 1.0
        for _ in ckpt.epochs(EPOCHS):
            for batch in ckpt.batches(loader):
                yield batch, factor
                factor *= 0.93

    for batch, factor in cycle():
        train_on(ckpt, model, optimizer, batch, factor, record)


class Accumulating:
    """A trainer that keeps the loader in an attribute and adds up the gradients of two batches."""

    def __init__(self, ckpt, batches):
        self.ckpt, self.batches, self.factor = ckpt, batches, 1.0

    def train(self, model, optimizer, record):
        while self.ckpt.progress.step < BATCHES * EPOCHS:
            total = 0.0
            for _ in range(2):
                batch = next(self.batches)
                loss = self.factor * loss_of(model, batch) / 2
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            self.ckpt.step(loss=total)
            self.factor *= 0.9
            record(total, model)
        self.ckpt.close()


def accumulation_from_an_attribute(directory, *, record, **options):
    """Each save finds the loop over two batches at its first one, as each launch does."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    Accumulating(ckpt, ckpt.batches(loader, epochs=3 * EPOCHS)).train(model, optimizer, record)


class Following:
    """A trainer with a generator of its own in an attribute."""

    def __init__(self, batches):
        self.factor, self.batches = 1.0, self.scaled(batches)

    def scaled(self, batches):
        for inputs, targets in batches:
            yield self.factor * inputs, targets
            self.factor *= 0.9

    def train(self, ckpt, model, optimizer, record):
        for batch in self.batches:
            train_on(ckpt, model, optimizer, batch, 1.0, record)


def generator_in_an_attribute(directory, *, record, **options):
    """The generator runs while its loop asks for a batch: its variables are those of a function."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    Following(ckpt.batches(loader, epochs=EPOCHS)).train(ckpt, model, optimizer, record)


def range_around_steps(directory, *, record, **options):
    """Two steps with each factor: the loop over them is at another position at every other save."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    batches, factor = ckpt.batches(loader, epochs=EPOCHS), 1.0
    while ckpt.progress.step < BATCHES * EPOCHS - 1:
        for _ in range(2):
            batch = next(batches)
            train_on(ckpt, model, optimizer, batch, factor, record)
        factor *= 0.9


def batch_fetched_ahead(directory, *, record, **options):
    """The next batch is fetched before the step of the one at hand; the last one is not used."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    batches, scale = iter(ckpt.batches(loader, epochs=EPOCHS)), 1.0
    following = next(batches)
    while True:
        batch = following
        try:
            following = next(batches)
        except StopIteration:
            break
        scale = 0.7 * scale + 0.3 * train_on(ckpt, model, optimizer, batch, scale, record)


def with_statement(directory, *, record, **options):
    """The loop is in ``with``, and its body too."""
    model, optimizer, loader = make()
    with Checkpointer(directory, model=model, optimizer=optimizer, **options) as ckpt:
        scale = 1.0
        with contextlib.ExitStack() as stack, torch.enable_grad():
            stack.callback(lambda: None)
            for batch in ckpt.batches(loader, epochs=EPOCHS):
                with contextlib.suppress(ValueError):
                    factor = scale
                scale = 0.7 * scale + 0.3 * train_on(ckpt, model, optimizer, batch, factor, record)


def try_except_and_continue(directory, *, record, **options):
    """A batch that fails is skipped with ``continue``; ``except`` counts it, ``finally`` all."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    num_failed = num_batches = 0
    try:
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            try:
                if num_batches % 4 == 1 and num_failed < num_batches:
                    raise ValueError
                factor = 0.4 + num_failed / 5
            except ValueError:
                num_failed += 1
                train_on(ckpt, model, optimizer, batch, 0.2, record)
                continue
            finally:
                num_batches += 1
            train_on(ckpt, model, optimizer, batch, factor, record)
    finally:
        model.eval()


def name_read_only_by_a_handler(directory, *, record, **options):
    """A variable that only ``except`` reads and assigns."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    bound = 1.0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        try:
            factor = float("not a number")
        except ValueError:
            bound = 0.8 * bound + 0.4 * loss_of(model, batch).item()
            factor = bound
        train_on(ckpt, model, optimizer, batch, factor, record)


def decorated(function):
    """A decorator as click has them: the function is called by a frame of another function."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with contextlib.ExitStack() as stack:
            stack.callback(print, "over")
            return function(*args, **kwargs)

    return wrapper


@decorated
def decorated_training_function(directory, *, record, **options):
    """A decorator and an ExitStack stand between the script and the loop."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    scale = 1.0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        scale = 0.7 * scale + 0.3 * train_on(ckpt, model, optimizer, batch, scale, record)


def loop_in_a_callback(directory, *, record, **options):
    """``functools.reduce`` asks for the batches; a function in the function makes the steps."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    scale = 1.0

    def run_batch(batch):
        nonlocal scale
        scale = 0.7 * scale + 0.3 * train_on(ckpt, model, optimizer, batch, scale, record)
        return scale

    functools.reduce(max, map(run_batch, ckpt.batches(loader, epochs=EPOCHS)))


def comprehension_as_the_loop(directory, *, record, **options):
    """The loop is a comprehension that appends to a list."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    scales = [1.0]
    [
        scales.append(0.3 + train_on(ckpt, model, optimizer, batch, scales[-1], record) / 2)
        for batch in ckpt.batches(loader, epochs=EPOCHS)
    ]


def loop_in_a_coroutine(directory, *, record, **options):
    """The loop is in an ``async`` function, which asyncio runs."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)

    async def run():
        scale = 1.0
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            scale = 0.7 * scale + 0.3 * train_on(ckpt, model, optimizer, batch, scale, record)
            await asyncio.sleep(0)

    asyncio.run(run())


def second_iterator(directory, *, record, **options):
    """Batches of a second loader come from an iterator of the script, which is made again."""
    model, optimizer, loader = make()
    others = DataLoader(loader.dataset, batch_size=4)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    iterator = iter(others)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        try:
            more, _ = next(iterator)
        except StopIteration:
            iterator = iter(others)
            more, _ = next(iterator)
        train_on(ckpt, model, optimizer, (inputs + more, targets), 1.0, record)


def cycle_of_factors(directory, *, record, **options):
    """Factors come in turn from ``itertools.cycle``."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    factors = itertools.cycle([1.0, 0.3, 0.7, 0.5])
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        train_on(ckpt, model, optimizer, batch, next(factors), record)


def falling(rate):
    """A learning rate for each step."""
    while True:
        yield rate
        rate *= 0.9


def schedule_that_is_a_generator(directory, *, record, **options):
    """The learning rate comes from a generator of the script, which is suspended in a save."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    rates = falling(0.1)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        optimizer.param_groups[0]["lr"] = next(rates)
        train_on(ckpt, model, optimizer, batch, 1.0, record)


# ---------------------------------------------------------------- epochs


def epoch_in_a_function(directory, *, record, **options):
    """The batches of an epoch are asked for in a function of the function."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)

    def train_epoch(factor):
        mean = 0.0
        for batch in ckpt.batches(loader):
            loss = train_on(ckpt, model, optimizer, batch, factor + mean / 10, record)
            mean = 0.8 * mean + 0.2 * loss
        return mean

    factor = 1.0
    for _ in ckpt.epochs(EPOCHS):
        mean = train_epoch(factor)
        factor = 0.5 * factor + mean


def with_epochs(change):
    """A shape whose function ``train_epoch(factor)`` returns the sum of the losses of an epoch.

    Args:
        change: called with the Checkpointer's epochs and this function; runs the epochs.
    """

    def train(directory, *, record, **options):
        model, optimizer, loader = make()
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)

        def train_epoch(factor):
            total = 0.0
            for batch in ckpt.batches(loader):
                total += train_on(ckpt, model, optimizer, batch, factor + total / 50, record)
            return total

        change(ckpt.epochs(EPOCHS), train_epoch)

    return train


def add_epochs(epochs, train_epoch):
    total = 3.0
    for _ in epochs:
        total += train_epoch(total / 6)


def concatenate_epochs(epochs, train_epoch):
    sums = [3.0]
    for _ in epochs:
        sums = sums + [train_epoch(sum(sums) / 9)]  # noqa: RUF005 - this shape


def append_epochs(epochs, train_epoch):
    sums = [3.0]
    for _ in epochs:
        sums.append(train_epoch(sum(sums) / 9))


def best_of_epochs(epochs, train_epoch):
    best = 9.0
    for _ in epochs:
        best = max(best * 0.9, train_epoch(best / 9))


def epochs_by_name(epochs, train_epoch):
    sums = {"all": [3.0]}
    for epoch in epochs:
        sums[f"epoch {epoch}"] = [train_epoch(sum(map(sum, sums.values())) / 12)]


sum_with_an_epoch_as_operand = with_epochs(add_epochs)
list_with_an_epoch_as_operand = with_epochs(concatenate_epochs)
list_that_appends_an_epoch = with_epochs(append_epochs)
maximum_with_an_epoch = with_epochs(best_of_epochs)
dictionary_of_epochs = with_epochs(epochs_by_name)


def rate_read_at_the_start_of_an_epoch(directory, *, record, **options):
    """A scheduler steps at the start of an epoch; a variable has the rate for the whole epoch."""
    model, optimizer, loader = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    rate = 0.025
    for _ in ckpt.epochs(EPOCHS):
        scheduler.step()
        rate = scheduler.get_last_lr()[0]
        for batch in ckpt.batches(loader):
            train_on(ckpt, model, optimizer, batch, 40 * rate, record)


def rate_passed_to_a_function(directory, *, record, **options):
    """The same as an argument of the function that trains an epoch."""
    model, optimizer, loader = make()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)

    def train_epoch(rate):
        for batch in ckpt.batches(loader):
            train_on(ckpt, model, optimizer, batch, 40 * rate, record)

    for _ in ckpt.epochs(EPOCHS):
        scheduler.step()
        train_epoch(scheduler.get_last_lr()[0])


def weights_as_an_epoch_found_them(directory, *, record, **options):
    """A proximal term draws the weights to what they were when the epoch began."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for _ in ckpt.epochs(EPOCHS):
        anchor = [p.detach().clone() for p in model.parameters()]
        for batch in ckpt.batches(loader):
            distance = sum(
                (p - q).square().sum() for p, q in zip(model.parameters(), anchor, strict=True)
            )
            train_on(ckpt, model, optimizer, batch, 1 + distance, record)


def sums_of_both_loops(directory, *, record, **options):
    """The sum of an epoch and the sum of all epochs decide."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    total = 0.0
    for _ in ckpt.epochs(EPOCHS):
        epoch_total = 0.0
        for batch in ckpt.batches(loader):
            factor = 0.5 + epoch_total / 20 + total / 40
            epoch_total += train_on(ckpt, model, optimizer, batch, factor, record)
        total += epoch_total


def consecutive_loops_in_an_epoch(directory, *, record, **options):
    """Two loops over two loaders in each epoch; between them a list is appended."""
    model, optimizer, loader = make()
    other = DataLoader(loader.dataset, batch_size=7, shuffle=True)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    scale, between = 1.0, [0.0]
    for _ in ckpt.epochs(EPOCHS):
        for batch in ckpt.batches(loader):
            factor = scale + between[-1]
            scale = 0.7 * scale + 0.3 * train_on(ckpt, model, optimizer, batch, factor, record)
        between.append(scale / 4)
        for batch in ckpt.batches(other, name="other"):
            factor = scale / 2 + len(between) / 10
            scale = 0.7 * scale + 0.3 * train_on(ckpt, model, optimizer, batch, factor, record)


def phases_in_an_epoch(directory, *, record, **options):
    """A loop over phases, each over its own loader, in each epoch."""
    model, optimizer, loader = make()
    other = DataLoader(loader.dataset, batch_size=7, shuffle=True)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    scale = 1.0
    for _ in ckpt.epochs(EPOCHS):
        for name, weight, each in (("one", 1.0, loader), ("other", 0.4, other)):
            for batch in ckpt.batches(each, name=name):
                factor = weight * scale
                scale = 0.7 * scale + 0.3 * train_on(ckpt, model, optimizer, batch, factor, record)


def list_popped_at_the_end_of_an_epoch(directory, *, record, **options):
    """A list of factors is popped at the end of each epoch."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    factors = [0.3, 0.6, 1.0]
    for _ in ckpt.epochs(EPOCHS):
        for batch in ckpt.batches(loader):
            train_on(ckpt, model, optimizer, batch, factors[-1], record)
        factors.pop()


def iterator_of_factors(directory, *, record, **options):
    """Each epoch takes its factor from an iterator over a list."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    factors = iter([1.0, 0.6, 0.3])
    for _ in ckpt.epochs(EPOCHS):
        factor = next(factors)
        for batch in ckpt.batches(loader):
            train_on(ckpt, model, optimizer, batch, factor, record)


def early_stopping(directory, *, record, **options):
    """A counter of bad steps lowers the learning rate and ends the training before its horizon."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    best, num_bad = float("inf"), 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = train_on(ckpt, model, optimizer, batch, 1.0, record)
        if loss > best:
            num_bad += 1
            optimizer.param_groups[0]["lr"] = 0.05 / num_bad
        best = min(loss, best)
        if num_bad == 12:
            ckpt.stop("no improvement")


def two_trainings_in_one_process(directory, *, record, **options):
    """Two folds, each with its own run directory; the second one uses the result of the first."""
    results = [0.2]
    for fold in (0, 1):
        model, optimizer, loader = make()
        given = {"model": model, "optimizer": optimizer}
        with Checkpointer(f"{directory}/fold-{fold}", **given, **options) as ckpt:
            scale = 1.0
            for batch in ckpt.batches(loader, epochs=EPOCHS):
                factor = scale + results[-1]
                scale = 0.7 * scale + 0.2 * train_on(ckpt, model, optimizer, batch, factor, record)
            results.append(scale)


def rate_of_the_epoch_from_a_variable(directory, *, record, **options):
    """A variable is halved at the start of each epoch; the learning rate is set from it."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    lr = 0.2
    for _ in ckpt.epochs(EPOCHS):
        lr *= 0.5
        for batch in ckpt.batches(loader):
            optimizer.param_groups[0]["lr"] = lr
            train_on(ckpt, model, optimizer, batch, 1.0, record)


# ---------------------------------------------------------------- changes at an epoch's start


def at_the_start_of_an_epoch(change):
    """A shape in which ``change(model, optimizer, rows)`` runs before an epoch's first batch.

    ``rows`` is a list that each step appends to and that scales the loss.
    """

    def train(directory, *, record, **options):
        model, optimizer, loader = make(lr=0.2)
        ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
        rows = []
        for _ in ckpt.epochs(EPOCHS):
            change(model, optimizer, rows)
            for batch in ckpt.batches(loader):
                factor = 0.4 + sum(rows[-9:]) / 9
                rows.append(train_on(ckpt, model, optimizer, batch, factor, record) / 2)

    return train


def halve_rate(model, optimizer, rows):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def decay_weights(model, optimizer, rows):
    for parameter in model.parameters():
        parameter.data.mul_(0.8)


def add_noise(model, optimizer, rows):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)


def clear_momentum(model, optimizer, rows):
    optimizer.state.clear()


def clear_rows(model, optimizer, rows):
    rows.clear()


def draw_numbers(model, optimizer, rows):
    np.random.rand()
    torch.rand(3)


rate_halved_at_the_start_of_an_epoch = at_the_start_of_an_epoch(halve_rate)
weights_scaled_at_the_start_of_an_epoch = at_the_start_of_an_epoch(decay_weights)
noise_on_weights_at_the_start_of_an_epoch = at_the_start_of_an_epoch(add_noise)
momentum_cleared_at_the_start_of_an_epoch = at_the_start_of_an_epoch(clear_momentum)
list_cleared_at_the_start_of_an_epoch = at_the_start_of_an_epoch(clear_rows)
numbers_drawn_at_the_start_of_an_epoch = at_the_start_of_an_epoch(draw_numbers)


if __name__ == "__main__":
    run_as_script(globals())
