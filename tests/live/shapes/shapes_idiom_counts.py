"""Counts, best values, schedules and thresholds that loops of real scripts move by themselves."""

from __future__ import annotations

import argparse
import random
from collections import deque

import numpy as np
import torch
from tiny_training import EPOCHS, loss_of, make, step
from torch.utils.data import DataLoader

from resumekit.adapters.torch import Checkpointer


def begin(directory, options):
    """A tiny model, its optimizer and its loader, with their Checkpointer."""
    model, optimizer, loader = make()
    return (
        model,
        optimizer,
        loader,
        Checkpointer(directory, model=model, optimizer=optimizer, **options),
    )


def evaluate(model):
    """The loss on fixed data, coarse, so that some evaluations do not improve."""
    model.eval()
    with torch.no_grad():
        outputs = model(torch.linspace(-1, 1, 32).reshape(8, 4))
        value = torch.nn.functional.mse_loss(outputs, torch.ones(8, 1)).item()
    model.train()
    return round(value, 2)


def set_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate


# ---------------------------------------------------------------- counts of steps and samples


def curriculum_by_a_count(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    seen, length = 0, 1
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        shown = inputs * (torch.arange(4) < length)
        loss = loss_of(model, (shown, targets))
        step(ckpt, optimizer, loss)
        seen += len(inputs)
        if seen > 20:
            length, seen = length + 1, 0
        record(loss, model)


def stages_of_a_curriculum(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    stages, stage, seen = [0.2, 0.5, 1.0], 0, 0
    for _ in ckpt.epochs(EPOCHS):
        for inputs, targets in ckpt.batches(loader):
            loss = loss_of(model, (inputs * stages[stage], targets))
            step(ckpt, optimizer, loss)
            seen += len(inputs)
            record(loss, model)
        if seen > 10:
            stage, seen = min(stage + 1, 2), 0


def annealed_with_numpy(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    temperature, num_steps = 1.0, 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * float(temperature)
        step(ckpt, optimizer, loss)
        if num_steps % 2 == 0:
            temperature = np.maximum(temperature * np.exp(-0.01 * num_steps), 0.1)
        num_steps += 1
        record(loss, model)


def schedule_that_pops(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    lr, schedule, num_steps = 0.1, {4: 0.05, 8: 0.02, 11: 0.2}, 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        lr = schedule.pop(num_steps, lr)
        set_rate(optimizer, lr * (1 + len(schedule)))
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        num_steps += 1
        record(loss, model)


def phases_by_a_match(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    phase, seen = "warm", 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        seen += 1
        match phase:
            case "warm":
                loss = loss_of(model, batch) * 0.1
                if seen == 5:
                    phase = "main"
            case _:
                loss = loss_of(model, batch) / seen
        step(ckpt, optimizer, loss)
        record(loss, model)


def weight_that_grows(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    beta = 0.0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = loss_of(model, batch) + beta * penalty
        step(ckpt, optimizer, loss)
        beta = min(0.1, beta + 4e-3)
        record(loss, model)


def countdown_to_the_next_copy(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    kept, copy_in = [p.detach().clone() for p in model.parameters()], 5
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        distance = sum(
            (p - q).square().sum() for p, q in zip(model.parameters(), kept, strict=True)
        )
        loss = loss_of(model, batch) + distance
        step(ckpt, optimizer, loss)
        copy_in -= 1
        if not copy_in:
            kept, copy_in = [p.detach().clone() for p in model.parameters()], 5
        record(loss, model)


def two_optimizers_that_alternate(directory, *, record, **options):
    model, optimizer, loader = make()
    other = torch.optim.Adam(model.parameters(), lr=0.02)
    both = {"sgd": optimizer, "adam": other}
    ckpt = Checkpointer(directory, model=model, optimizer=both, **options)
    turn = True
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer if turn else other, loss)
        turn = not turn
        record(loss, model)


def micro_batch_that_failures_halve(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    size, num_steps = 4, 0
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        num_steps += 1
        try:
            if size * num_steps > 16:
                raise RuntimeError("out of memory")
        except RuntimeError:
            size = max(1, size // 2)
        loss = loss_of(model, (inputs[:size], targets[:size]))
        step(ckpt, optimizer, loss)
        record(loss, model)


def failures_in_a_row(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    failures = 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * (1 + failures)
        step(ckpt, optimizer, loss)
        try:
            if loss.item() > 0.4:
                raise ValueError
            failures = 0
        except ValueError:
            failures += 1
        record(loss, model)


def scale_by_hand(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    scale, good = 4.0, 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        (loss * scale).backward()
        if loss.item() * scale < 6:
            for p in model.parameters():
                p.grad.div_(scale + good)
            good += 1
            scale *= 2 if good % 3 == 0 else 1
        else:
            scale, good = scale / 2, 0
        optimizer.step()
        ckpt.step(loss=loss)
        record(loss, model)


def normalisation_by_a_running_mean(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    count, mean = 0, 0.0
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        count += 1
        mean += (targets.mean().item() - mean) / count
        loss = loss_of(model, (inputs, targets - mean))
        step(ckpt, optimizer, loss)
        record(loss, model)


def moving_baseline(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    baseline = 0.0
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        reward = targets[:, 1].mean()
        loss = (reward - baseline) * model(inputs).tanh().mean() + loss_of(model, (inputs, targets))
        baseline = 0.9 * baseline + 0.1 * reward.item()
        step(ckpt, optimizer, loss)
        record(loss, model)


def threshold_that_begins_with_none(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    average = None
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
        if loss.item() > average:
            loss = loss * 0.1
        step(ckpt, optimizer, loss)
        record(loss, model)


def two_values_that_follow_each_other(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    a = b = 1.0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * a
        step(ckpt, optimizer, loss)
        b = b * 0.9
        a = b if loss.item() > 0.5 else a
        record(loss, model)


# ---------------------------------------------------------------- what the end of an epoch decides


def ratio_of_an_epoch(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    ratio = 1.0
    for _ in ckpt.epochs(EPOCHS):
        for inputs, targets in ckpt.batches(loader):
            forced = targets if random.random() < ratio else targets.flip(0)
            loss = loss_of(model, (inputs, forced))
            step(ckpt, optimizer, loss)
            record(loss, model)
        ratio = max(0.0, ratio - 0.4)


def rate_that_the_script_decays(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    lr, best = 0.1, 0.0
    for _ in ckpt.epochs(EPOCHS):
        set_rate(optimizer, lr)
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            record(loss, model)
        if (value := evaluate(model)) > best:
            lr *= 0.5
        best = min(value, best)


def plateau_by_hand(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    best, wait, cooldown = 1e9, 0, 0
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        if cooldown > 0:
            cooldown, wait = cooldown - 1, 0
        if loss.item() < best:
            best, wait = loss.item(), 0
        elif cooldown == 0:
            wait += 1
            if wait >= 2:
                set_rate(optimizer, optimizer.param_groups[0]["lr"] * 0.7)
                cooldown, wait = 2, 0
        record(loss, model)


def counts_in_a_dict(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    track = {"best": 1e9, "bad": 0}
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) / (1 + track["bad"])
        step(ckpt, optimizer, loss)
        if loss.item() < track["best"]:
            track["best"], track["bad"] = loss.item(), 0
        else:
            track["bad"] += 1
        record(loss, model)


def index_into_a_list_of_rates(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    rates, k, best = [0.1, 0.01, 0.05, 0.2], 0, 1e9
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        if loss.item() > best:
            k = (k + 1) % 4
            set_rate(optimizer, rates[k])
        best = min(loss.item(), best)
        record(loss, model)


def step_of_the_best_value(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    best, best_step, batches = 1e9, 0, ckpt.batches(loader, epochs=EPOCHS)
    for number, batch in enumerate(batches, start=batches.initial):
        loss = loss_of(model, batch) / (1 + number - best_step)
        step(ckpt, optimizer, loss)
        if (value := evaluate(model)) < best:
            best, best_step = value, number
        record(loss, model)


def best_three(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    best = []
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * (1 + sum(value for value, _ in best))
        step(ckpt, optimizer, loss)
        if len(best) < 3 or loss.item() < best[-1][0]:
            best.append((loss.item(), f"{len(best)}.pt"))
            best.sort()
            best = best[:3]
        record(loss, model)


def phase_and_epoch_of_the_script(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    epoch, phase = 0, "a"
    for _ in ckpt.epochs(EPOCHS):
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch) * (0.2 if phase == "a" else 1 / (1 + epoch))
            step(ckpt, optimizer, loss)
            record(loss, model)
        phase = "b" if phase == "a" else "a"
        epoch += 1


def batch_size_that_an_epoch_halves(directory, *, record, **options):
    """Each epoch's loader is made from a variable that the epoch before has set."""
    model, optimizer, loader, ckpt = begin(directory, options)
    size = 4
    for _ in ckpt.epochs(EPOCHS):
        for batch in ckpt.batches(DataLoader(loader.dataset, batch_size=size, shuffle=True)):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            record(loss, model)
        size //= 2


def metric_that_an_epoch_resets(directory, *, record, **options):
    class Mean:
        def __init__(self):
            self.reset()

        def reset(self):
            self.total, self.count = 0.0, 0

        def update(self, value):
            self.total, self.count = self.total + value, self.count + 1

    model, optimizer, loader, ckpt = begin(directory, options)
    metric, weight = Mean(), 1.0
    for _ in ckpt.epochs(EPOCHS):
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch) * weight
            step(ckpt, optimizer, loss)
            metric.update(loss.item())
            record(loss, model)
        weight = metric.total / metric.count
        metric.reset()


def sums_of_an_epoch_that_weigh_the_next(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    weights, previous = torch.ones(2), None
    for _ in ckpt.epochs(EPOCHS):
        total = torch.zeros(2)
        for inputs, targets in ckpt.batches(loader):
            losses = torch.stack([loss_of(model, (inputs, targets)), model(inputs).square().mean()])
            loss = (losses * weights).sum()
            step(ckpt, optimizer, loss)
            total += losses.detach()
            record(loss, model)
        if previous is not None:
            weights = torch.softmax(total / previous, 0)
        previous = total


def prior_of_the_predictions(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    prior = torch.ones(2) / 2
    for _ in ckpt.epochs(EPOCHS):
        counts = torch.ones(2)
        for inputs, targets in ckpt.batches(loader):
            loss = loss_of(model, (inputs * prior[0], targets))
            step(ckpt, optimizer, loss)
            counts += torch.bincount((inputs.mean(1) > 0).long(), minlength=2)
            record(loss, model)
        prior = counts / counts.sum()


def option_that_training_changes(directory, *, record, **options):
    args = argparse.Namespace(weight=1.0, best=1e9)
    model, optimizer, loader, ckpt = begin(directory, options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * args.weight
        step(ckpt, optimizer, loss)
        if loss.item() < args.best:
            args.best = loss.item()
            args.weight *= 0.8
        record(loss, model)


def factor_among_the_settings(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    config = {"factor": 1.0, "epochs": EPOCHS}
    scaled = lambda loss: loss * config["factor"]  # noqa: E731
    for _ in ckpt.epochs(config["epochs"]):
        for batch in ckpt.batches(loader):
            loss = scaled(loss_of(model, batch))
            step(ckpt, optimizer, loss)
            record(loss, model)
        config["factor"] *= 0.5


def count_that_a_lambda_reads(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    n = 0
    warm = lambda: min(1.0, n / 10)  # noqa: E731
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        set_rate(optimizer, 0.1 * warm())
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        n += 1
        record(loss, model)


def recent_losses_in_a_new_list(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    recent = [0.0] * 4
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) * (0.5 + sum(recent))
        recent = recent[1:] + [loss.item()]  # noqa: RUF005
        step(ckpt, optimizer, loss)
        record(loss, model)


def scores_that_end_the_training(directory, *, record, **options):
    model, optimizer, loader, ckpt = begin(directory, options)
    scores = deque(maxlen=9)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)
        scores.append(loss.item())
        if len(scores) == 9 and ckpt.progress.step > 15 and scores[0] > np.mean(scores) / 9:
            break


def argument_of_the_launch(directory, *, record, **options):
    """The recorder itself differs in each launch: what a launch is given stays its own."""

    def train(given, num_epochs, *, lr):
        model, optimizer, loader, ckpt = begin(directory, options)
        bonus = 0.0
        for _ in ckpt.epochs(num_epochs):
            set_rate(optimizer, lr)
            for batch in ckpt.batches(loader):
                loss = loss_of(model, batch) + bonus
                step(ckpt, optimizer, loss)
                bonus += 0.1 * loss.item()
                given(loss, model)

    train(record, EPOCHS, lr=0.03)
