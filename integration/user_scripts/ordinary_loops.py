"""Ordinary training loops, which ``strict=True`` starts with nothing added.

Each is what a script of its kind does beside training: meters, timers, progress bars, writers.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digits import Digits
from judged_script import record
from torch import nn
from torch.distributed import all_reduce, destroy_process_group, get_rank, init_process_group
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics.classification import MulticlassAccuracy
from tqdm import tqdm

from resumekit.adapters.torch import Checkpointer

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 80, 16, 2
SETTINGS: dict[str, Any] = {"save_every": 3, "strict": True}


def make_parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Digits(NUM_SAMPLES, augment=True)
    return model, optimizer, DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)


def running_loss(directory: str) -> None:
    """The running loss of torch's tutorials, printed every second batch."""
    model, optimizer, loader = make_parts()
    criterion = nn.CrossEntropyLoss()
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **SETTINGS)
    for epoch in ckpt.epochs(EPOCHS):
        running_loss = 0.0
        batches = ckpt.batches(loader)
        for i, data in enumerate(batches, start=batches.initial):
            inputs, labels = data
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            if i % 2 == 1:
                print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / 2:.3f}")
                running_loss = 0.0
            record(epoch * len(loader) + i + 1, loss=loss, optimizers=optimizer, inputs=inputs)
            ckpt.step(loss=loss)


def progress_bar(directory: str) -> None:
    """A bar over one loop, with the loss and the learning rate behind it."""
    model, optimizer, loader = make_parts()
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    ckpt = Checkpointer(
        directory, model=model, optimizer=optimizer, lr_scheduler=scheduler, **SETTINGS
    )
    batches = ckpt.batches(loader, epochs=EPOCHS)
    bar = tqdm(batches, initial=batches.initial, total=EPOCHS * len(loader))
    total_loss = 0.0
    for step, (inputs, labels) in enumerate(bar, start=batches.initial + 1):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total_loss += loss.item()
        bar.set_postfix(loss=total_loss / step, lr=scheduler.get_last_lr()[0])
        record(step, loss=loss, optimizers=optimizer, inputs=inputs)
        ckpt.step(loss=loss)


class AverageMeter:
    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def reset(self) -> None:
        self.val = self.sum = self.avg = 0.0
        self.count = 0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self) -> str:
        return f"{self.name} {self.val:.3f} ({self.avg:.3f})"


class ProgressMeter:
    def __init__(self, num_batches: int, meters: list[AverageMeter]) -> None:
        self.num_batches = num_batches
        self.meters = meters

    def display(self, batch: int) -> None:
        print(f"[{batch}/{self.num_batches}]", *map(str, self.meters), sep="\t")


def meters_and_timers(directory: str) -> None:
    """The meters of torch's ImageNet example."""
    model, optimizer, loader = make_parts()
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    ckpt = Checkpointer(
        directory, model=model, optimizer=optimizer, lr_scheduler=scheduler, **SETTINGS
    )
    for epoch in ckpt.epochs(EPOCHS):
        batch_time, data_time = AverageMeter("Time"), AverageMeter("Data")
        losses, top1 = AverageMeter("Loss"), AverageMeter("Acc@1")
        progress = ProgressMeter(len(loader), [batch_time, data_time, losses, top1])
        model.train()
        end = time.time()
        batches = ckpt.batches(loader)
        for i, (images, target) in enumerate(batches, start=batches.initial):
            data_time.update(time.time() - end)
            output = model(images)
            loss = nn.functional.cross_entropy(output, target)
            accuracy = (output.argmax(1) == target).float().mean()
            losses.update(loss.item(), images.size(0))
            top1.update(accuracy.item(), images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batch_time.update(time.time() - end)
            end = time.time()
            if i % 2 == 0:
                progress.display(i + 1)
            record(epoch * len(loader) + i + 1, loss=loss, optimizers=optimizer, inputs=images)
            ckpt.step(loss=loss)
        scheduler.step()


class ScalarWriter:
    """The calls of tensorboard's SummaryWriter, which is not installed here."""

    def __init__(self, log_dir: str) -> None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        self.file = open(Path(log_dir) / "events", "a", encoding="utf-8")  # noqa: SIM115
        self.num_written = 0

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        self.num_written += 1
        self.file.write(f"{tag} {global_step} {value}\n")

    def close(self) -> None:
        self.file.close()


def scalar_writer(directory: str) -> None:
    """Scalars for a tracker at every step, and of each epoch."""
    model, optimizer, loader = make_parts()
    writer = ScalarWriter(f"{directory}-logs")
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **SETTINGS)
    for epoch in ckpt.epochs(EPOCHS):
        epoch_loss = 0.0
        batches = ckpt.batches(loader)
        for index, (inputs, labels) in enumerate(batches, start=batches.initial):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            epoch_loss += loss.item() * len(inputs)
            step = epoch * len(loader) + index + 1
            writer.add_scalar("train/loss", loss.item(), step)
            writer.add_scalar("train/lr", optimizer.param_groups[0]["lr"], step)
            record(step, loss=loss, optimizers=optimizer, inputs=inputs)
            ckpt.step(loss=loss)
        writer.add_scalar("train/epoch_loss", epoch_loss / NUM_SAMPLES, epoch)
    writer.close()


def early_break(directory: str) -> None:
    """A loop that a limit of its own ends before the horizon."""
    model, optimizer, loader = make_parts()
    limit = 9
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **SETTINGS)
    batches = ckpt.batches(loader, epochs=EPOCHS)
    for step, (inputs, labels) in enumerate(batches, start=batches.initial + 1):
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(step, loss=loss, optimizers=optimizer, inputs=inputs)
        ckpt.step(loss=loss)
        if step >= limit:
            break


@torch.no_grad()
def accuracy_of(model: nn.Module) -> float:
    metric = MulticlassAccuracy(num_classes=10)
    model.eval()
    for inputs, labels in DataLoader(Digits(40, augment=False), batch_size=20):
        metric.update(model(inputs), labels)
    model.train()
    return metric.compute().item()


def evaluation_and_best(directory: str) -> None:
    """Evaluates inside and after an epoch; the best checkpoint and one of each epoch are kept."""
    model, optimizer, loader = make_parts()
    best: dict[str, Any] = {"best_metric": "accuracy", "mode": "max"}
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **best, **SETTINGS)
    for epoch in ckpt.epochs(EPOCHS):
        batches = ckpt.batches(loader)
        for index, (inputs, labels) in enumerate(batches, start=batches.initial):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if index == 2:
                print(f"epoch {epoch}, in the middle: {accuracy_of(model):.3f}")
            step = epoch * len(loader) + index + 1
            record(step, loss=loss, optimizers=optimizer, inputs=inputs)
            ckpt.step(loss=loss)
        ckpt.report(accuracy=accuracy_of(model))
        torch.save(model.state_dict(), f"{directory}-epoch-{epoch}.pt")


def averaged_weights(directory: str) -> None:
    """Averaged weights in bf16 autocast."""
    model, optimizer, loader = make_parts()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, ema=ema, **SETTINGS)
    batches = ckpt.batches(loader, epochs=EPOCHS)
    for step, (inputs, labels) in enumerate(batches, start=batches.initial + 1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update_parameters(model)
        state = {"ema": [*ema.parameters()]}
        record(step, loss=loss, optimizers=optimizer, inputs=inputs, state=state)
        ckpt.step(loss=loss)


def accumulation(directory: str) -> None:
    """Windows of two batches, the gradient norm among the metrics."""
    model, optimizer, loader = make_parts()
    window = 2
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **SETTINGS)
    for epoch in ckpt.epochs(4):
        batches = ckpt.batches(loader)
        for index, (inputs, labels) in enumerate(batches, start=batches.initial):
            loss = nn.functional.cross_entropy(model(inputs), labels) / window
            loss.backward()
            if (index + 1) % window == 0 or index + 1 == len(loader):
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                print({"epoch": epoch, "grad_norm": norm.item(), "loss": loss.item()})
                step = epoch * 3 + index // window + 1
                record(step, loss=loss, optimizers=optimizer, inputs=inputs)
                ckpt.step(loss=loss)


def metrics_in_lists(directory: str) -> None:
    """Lists and dicts of metrics, printed at the end of an epoch."""
    model, optimizer, loader = make_parts()
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    history: dict[str, list[float]] = defaultdict(list)
    started = time.time()
    ckpt = Checkpointer(
        directory, model=model, optimizer=optimizer, lr_scheduler=scheduler, **SETTINGS
    )
    for epoch in ckpt.epochs(EPOCHS):
        losses = []
        correct, total = 0, 0
        batches = ckpt.batches(loader)
        for index, (inputs, labels) in enumerate(batches, start=batches.initial):
            outputs = model(inputs)
            loss = nn.functional.cross_entropy(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            correct += (outputs.argmax(1) == labels).sum().item()
            total += len(labels)
            step = epoch * len(loader) + index + 1
            record(step, loss=loss, optimizers=optimizer, inputs=inputs)
            ckpt.step(loss=loss)
        scheduler.step()
        history["loss"].append(sum(losses) / len(losses))
        history["accuracy"].append(correct / total)
        history["seconds"].append(time.time() - started)
        print(json.dumps(history))


def ddp_meters(directory: str) -> None:
    """DDP: the mean loss of all ranks for rank 0's log line."""
    init_process_group("gloo")
    model, _, _ = make_parts()
    torch.manual_seed(get_rank())
    model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = Digits(NUM_SAMPLES, augment=True)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, **SETTINGS)
    for epoch in ckpt.epochs(EPOCHS):
        sampler.set_epoch(epoch)
        meter = AverageMeter("Loss")
        batches = ckpt.batches(loader)
        for index, (inputs, labels) in enumerate(batches, start=batches.initial):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            reduced = loss.detach().clone()
            all_reduce(reduced)
            meter.update(reduced.item() / int(os.environ["WORLD_SIZE"]), len(inputs))
            if get_rank() == 0 and index % 2 == 0:
                print(f"epoch {epoch}: {meter}")
            step = epoch * len(loader) + index + 1
            record(step, loss=loss, optimizers=optimizer, inputs=inputs)
            ckpt.step(loss=loss)
    ckpt.close()
    destroy_process_group()
