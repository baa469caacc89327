"""Ordinary loops that carry nothing which decides: they start under ``strict=True``, silently."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import torch
from tiny_training import BATCH_SIZE, EPOCHS, loss_of, make, run_as_script, step
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from resumekit.adapters.torch import Checkpointer


def running_loss(directory, *, record, **options):
    """The running loss of torch's tutorials, printed every third batch."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in ckpt.epochs(EPOCHS):
        running_loss = 0.0
        batches = ckpt.batches(loader)
        for index, batch in enumerate(batches, start=batches.initial):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            running_loss += loss.item()
            if index % 3 == 2:
                print(f"[{epoch + 1}, {index + 1:5d}] loss: {running_loss / 3:.3f}")
                running_loss = 0.0
            record(loss, model)


def dataset_of_each_epoch(directory, *, record, **options):
    """Each epoch reads another dataset, which is used again when its batches are over."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in ckpt.epochs(EPOCHS):
        shard = datasets.Dataset.from_dict({"row": [epoch, epoch + 1]})
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch) * shard[0]["row"]
            step(ckpt, optimizer, loss)
            record(loss, model)
        print(len(shard))


def progress_bar_with_the_loss(directory, *, record, **options):
    """tqdm with the mean loss behind it."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    batches = ckpt.batches(loader, epochs=EPOCHS)
    bar = tqdm(batches, initial=batches.initial, total=len(batches))
    total = 0.0
    for batch in bar:
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        total += loss.item()
        bar.set_postfix(loss=total / (bar.n + 1))
        record(loss, model)


def bar_over_the_epochs(directory, *, record, **options):
    """tqdm over the epochs and over the batches."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in tqdm(ckpt.epochs(EPOCHS), desc="epochs"):
        for batch in tqdm(ckpt.batches(loader), desc=f"epoch {epoch}", leave=False):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            record(loss, model)


def named_bar_over_the_epochs(directory, *, record, **options):
    """The same with a name, as a bar has that shows the loss of the epoch."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    with tqdm(ckpt.epochs(EPOCHS)) as bar:
        for _ in bar:
            for batch in ckpt.batches(loader):
                loss = loss_of(model, batch)
                step(ckpt, optimizer, loss)
                record(loss, model)
            bar.set_description(f"loss {loss.item():.3f}")


def further_batch(source):
    """Of a loader beside the loop: the next one that is not short."""
    while True:
        batch = next(source)
        if len(batch[0]) == BATCH_SIZE:
            return batch


def function_that_fetches_a_batch(directory, *, record, **options):
    """The loop's body calls a function that asks a second loader for a batch."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    others = ckpt.batches(make()[2], name="others", repeat=True)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch) + 0.1 * loss_of(model, further_batch(others))
        step(ckpt, optimizer, loss)
        record(loss, model)


def seconds_of_each_step(directory, *, record, **options):
    """The time of each step and of all is measured and printed."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    started = before = time.time()
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        waited = time.time() - before
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        print(f"{time.time() - before:.3f} s, {waited:.3f} s for data, {time.time() - started:.1f}")
        before = time.time()
        record(loss, model)
    print(f"done in {time.time() - started:.0f} s")


class Writer:
    """As TensorBoard's: it appends to a file that it keeps open, and counts what it wrote."""

    def __init__(self, path):
        self.file = path.open("a", encoding="utf-8")
        self.num_written = 0

    def add_scalar(self, name, value, index):
        self.num_written += 1
        print(json.dumps({"name": name, "value": value, "index": index}), file=self.file)


def writer_of_scalars(directory, *, record, **options):
    """A writer object that keeps a file open."""
    model, optimizer, loader = make()
    writer = Writer(Path(f"{directory}-scalars.jsonl"))
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        writer.add_scalar("loss", loss.item(), ckpt.progress.step)
        record(loss, model)
    writer.file.close()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total = sum(loss_of(model, batch).item() for batch in loader)
    model.train()
    return total / len(loader)


def best_value_by_report(directory, *, record, **options):
    """An evaluation after each epoch, whose value is reported to the Checkpointer."""
    model, optimizer, loader = make()
    options |= {"best_metric": "eval_loss"}
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in ckpt.epochs(EPOCHS):
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            record(loss, model)
        eval_loss = evaluate(model, loader)
        ckpt.report(eval_loss=eval_loss)
        print(f"epoch {epoch}: {eval_loss:.4f}")


def evaluation_every_few_steps(directory, *, record, **options):
    """An evaluation every fourth step, printed."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        if ckpt.progress.step % 4 == 0:
            print(f"step {ckpt.progress.step}: {evaluate(model, loader):.4f}")
        record(loss, model)


def profiler_context(directory, *, record, **options):
    """A profiler around the loop, which advances with each step."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for batch in ckpt.batches(loader, epochs=EPOCHS):
            with torch.profiler.record_function("step"):
                loss = loss_of(model, batch)
                step(ckpt, optimizer, loss)
            record(loss, model)
    print(len(profiler.key_averages()))


def losses_of_each_epoch(directory, *, record, **options):
    """Lists that each epoch makes again; their means are printed."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in ckpt.epochs(EPOCHS):
        values = defaultdict(list)
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            values["loss"].append(loss.item())
            record(loss, model)
        print(epoch, {name: sum(each) / len(each) for name, each in values.items()})


class AverageMeter:
    """The meter of torch's ImageNet example."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.sum, self.count = 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1


def meters(directory, *, record, **options):
    """Meters that each epoch resets."""
    model, optimizer, loader = make()
    losses, seconds = AverageMeter(), AverageMeter()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for epoch in ckpt.epochs(EPOCHS):
        losses.reset()
        seconds.reset()
        before = time.perf_counter()
        for batch in ckpt.batches(loader):
            loss = loss_of(model, batch)
            step(ckpt, optimizer, loss)
            losses.update(loss.item())
            seconds.update(time.perf_counter() - before)
            before = time.perf_counter()
            record(loss, model)
        print(f"{epoch}: {losses.sum / max(losses.count, 1):.3f} in {seconds.sum:.1f} s")


def mixed_precision_and_clipping(directory, *, record, **options):
    """bfloat16, clipped gradients and a scheduler that is given."""
    model, optimizer, loader = make()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=21)
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
    ckpt = Checkpointer(directory, **given, **options)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(inputs) - targets[:, :1]).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        ckpt.step(loss=loss, norm=norm)
        record(loss, model)


def value_kept_in_extras(directory, *, record, **options):
    """A value that decides is kept in ``extras``, as the documentation shows."""
    model, optimizer, loader = make()
    extras = {"scale": 1.0}
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, extras=extras, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = extras["scale"] * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        extras["scale"] = 0.7 * extras["scale"] + 0.3 * loss.item()
        record(loss, model)


def attribute_of_the_model(directory, *, record, **options):
    """A number in an attribute of the model scales the loss; the model is saved with it."""
    model, optimizer, loader = make()
    model.scale = 1.0
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = model.scale * loss_of(model, batch)
        step(ckpt, optimizer, loss)
        model.scale = 0.7 * model.scale + 0.3 * loss.item()
        record(loss, model)


class Service:
    """What cannot be saved, and need not be: a lock, a thread pool, a logger, a pattern."""

    def __init__(self):
        self.lock, self.pool = threading.Lock(), ThreadPoolExecutor(1)
        self.logger, self.pattern = logging.getLogger("shapes"), re.compile("[a-z]+")

    def note(self, loss):
        with self.lock:
            if self.pattern.match(self.pool.submit(str, loss).result()):
                self.logger.warning("the loss is %s", loss)


def objects_that_cannot_be_saved(directory, *, record, **options):
    """An object with a lock, a thread pool and a logger, which each step uses."""
    model, optimizer, loader = make()
    service = Service()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        service.note(loss.item())
        record(loss, model)


def settings_of_each_launch(directory, *, record, **options):
    """Settings that differ from launch to launch: a resume leaves them as the script set them."""
    model, optimizer, loader = make()
    started_at = time.time()
    is_new = not Path(directory).exists()
    settings = {"print_every": 2 if is_new else 5, "pid": os.getpid()}
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    for batch in ckpt.batches(loader, epochs=EPOCHS):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        expected = {"print_every": 2 if is_new else 5, "pid": os.getpid()}
        if settings != expected or not 0 <= time.time() - started_at < 60:
            raise RuntimeError(f"{settings} are not those of this launch")
        record(loss, model)


def constants_and_helpers(directory, *, record, **options):
    """Settings in a dict, a function in the function and a context: all read, never changed."""
    model, optimizer, loader = make()
    settings = {"factor": 0.7, "names": ["a", "b"]}

    def weigh(loss):
        return settings["factor"] * loss

    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)
    with contextlib.ExitStack() as stack:
        stack.callback(print, "over")
        for epoch in ckpt.epochs(EPOCHS):
            for batch in ckpt.batches(loader):
                loss = weigh(loss_of(model, batch))
                step(ckpt, optimizer, loss)
                record(loss, model)
            print(epoch, settings["names"])


class Diffusion:
    """A trainer of the user's, with a score that this training does not compute."""

    def __init__(self, directory, options):
        self.model, self.optimizer, self.loader = make()
        self.calculate_fid, self.best_fid = False, 1e10
        given = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt = Checkpointer(directory, **given, **options)

    def train(self, record):
        for batch in self.ckpt.batches(self.loader, epochs=EPOCHS):
            loss = loss_of(self.model, batch)
            step(self.ckpt, self.optimizer, loss)
            if self.calculate_fid:
                fid_score = loss.item()
                if fid_score < self.best_fid:
                    self.best_fid = fid_score
                print(fid_score, self.best_fid)
            record(loss, self.model)


def metrics_that_are_switched_off(directory, *, record, **options):
    """The code for a metric is in the loop and never runs."""
    Diffusion(directory, options).train(record)


if __name__ == "__main__":
    run_as_script(globals())


def count_that_is_displayed(directory, *, record, **options):
    """The count of ``enumerate`` reaches a function of the script that prints."""
    model, optimizer, loader = make()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **options)

    def display(index, *values):
        entries = [f"[{index}/{len(loader)}]"]
        entries += [str(value) for value in values]
        print("\t".join(entries))

    for index, batch in enumerate(ckpt.batches(loader, epochs=EPOCHS)):
        loss = loss_of(model, batch)
        step(ckpt, optimizer, loss)
        record(loss, model)
        if index % 2 == 0:
            display(index, loss.item())
