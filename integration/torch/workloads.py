"""Training functions that the conformance kit launches, kills and compares.

Each is a loop of the kind that people write, on scikit-learn's handwritten digits; its options are
the factors of the test matrix. It never looks at whether it was started before.
"""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from annealed import Annealed
from digits import Digits
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from resumekit.adapters.torch import Checkpointer

NUM_SAMPLES = 96
BATCH_SIZE = 8


class OddThenEven(Sampler[int]):
    """A user's own sampler with a private generator."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rng = np.random.default_rng(7)

    def __iter__(self) -> Any:
        odd, even = np.arange(1, self.length, 2), np.arange(0, self.length, 2)
        yield from self.rng.permutation(odd).tolist()
        yield from self.rng.permutation(even).tolist()

    def __len__(self) -> int:
        return self.length


def make_loader(data: Digits, kind: str, workers: str, world_size: int) -> DataLoader[Any]:
    """A loader with the sampler and the workers that the cell asks for."""
    settings: dict[str, Any] = {
        "num_workers": 0 if workers == "0" else 2,
        "persistent_workers": workers == "persistent",
    }
    generator = torch.Generator().manual_seed(11)
    if world_size > 1:
        sampler: Any = DistributedSampler(data, shuffle=True, seed=3)
        return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, **settings)
    if kind == "shuffle":
        return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, **settings)
    if kind == "generator":
        return DataLoader(
            data, batch_size=BATCH_SIZE, shuffle=True, generator=generator, **settings
        )
    if kind == "replacement":
        sampler = RandomSampler(data, replacement=True, num_samples=80, generator=generator)
    elif kind == "weighted":
        sampler = WeightedRandomSampler([1.0 + i % 3 for i in range(len(data))], len(data))
    else:
        sampler = OddThenEven(len(data))
    if kind == "batch_sampler":
        batch_sampler = BatchSampler(sampler, BATCH_SIZE, drop_last=True)
        return DataLoader(data, batch_sampler=batch_sampler, **settings)
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler, **settings)


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the cell asks for."""
    if name == "sgd":
        return SGD(model.parameters(), lr=0.05, momentum=0.9)
    if name == "adamw":
        return AdamW(model.parameters(), lr=1e-2)
    weights = [p for p in model.parameters() if p.ndim > 1]
    biases = [p for p in model.parameters() if p.ndim <= 1]
    return Adam([{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 5e-3}], lr=1e-2)


def make_scheduler(name: str, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    """The scheduler that the cell asks for."""
    if name == "onecycle":
        return OneCycleLR(optimizer, max_lr=0.02, total_steps=60)
    if name == "lambda":
        return LambdaLR(optimizer, lambda step: 0.95**step)
    return None


def train(
    directory: str,
    *,
    optimizer: str = "adamw",
    dropout: bool = True,
    ema: bool = False,
    scheduler: str = "none",
    amp: str = "none",
    loader: str = "shuffle",
    workers: str = "0",
    augment: bool = False,
    accumulate: int = 1,
    loop: str = "batches",
    epochs: int = 2,
    save_every: int = 3,
    report: bool = False,
    annealed: bool = False,
    async_save: bool = False,
) -> None:
    """Trains a small classifier; see the module's docstring."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
        torch.manual_seed(torch.distributed.get_rank() + 1)  # ranks draw different dropout masks
    data = Digits(NUM_SAMPLES, augment=augment)
    batches = make_loader(data, loader, workers, world_size)
    bare = nn.Sequential(
        nn.Linear(64, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        Annealed(32) if annealed else nn.Dropout(0.3 if dropout else 0.0),
        nn.Linear(32, 10),
    )
    if world_size > 1:
        for parameter in bare.parameters():
            torch.distributed.broadcast(parameter.data, src=0)
    model = nn.parallel.DistributedDataParallel(bare) if world_size > 1 else bare
    optim = make_optimizer(optimizer, model)
    schedule = make_scheduler(scheduler, optim)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=2.0**12, growth_interval=4, enabled=amp == "fp16"
    )
    average = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if ema else None

    extras = {"images_seen": 0}
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=optim,
        lr_scheduler=schedule,
        grad_scaler=scaler if amp == "fp16" else None,
        ema=average,
        extras=extras,
        save_every=save_every,
        best_metric="loss" if report else None,
        async_save=async_save,
    )
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(amp)
    micro = 0

    def one_batch(images: torch.Tensor, labels: torch.Tensor) -> None:
        nonlocal micro
        extras["images_seen"] += len(images)
        with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
            loss = nn.functional.cross_entropy(model(images).float(), labels) / accumulate
        scaler.scale(loss).backward()
        micro += 1
        if micro % accumulate:
            return
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        if schedule is not None:
            schedule.step()
        if average is not None:
            average.update_parameters(bare)
        checkpointer.step(loss=loss, tokens=images.numel())

    if loop == "batches":
        for images, labels in checkpointer.batches(batches, epochs=epochs):
            one_batch(images, labels)
            if report and checkpointer.progress.step % 5 == 0:
                checkpointer.report(loss=evaluate(bare, data))
    else:
        for _ in checkpointer.epochs(epochs):
            random.random()
            for images, labels in checkpointer.batches(batches):
                one_batch(images, labels)
            if report:
                checkpointer.report(loss=evaluate(bare, data))
    checkpointer.close()


def evaluate(model: nn.Module, data: Digits) -> float:
    """The loss over all samples; it draws random numbers, as real evaluations do."""
    model.eval()
    with torch.no_grad():
        noise = 0.01 * torch.randn(data.images.shape)
        outputs = model(data.images + noise)
        loss = nn.functional.cross_entropy(outputs, torch.tensor(data.labels))
    model.train()
    return float(loss)
