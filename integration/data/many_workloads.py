"""Training functions over several loaders, changing loaders and accumulation windows.

Each is a loop of the kind that people write, on scikit-learn's handwritten digits, and none looks
at whether it was started before.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from digits import Digits
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, DistributedSampler, Sampler, Subset

from resumekit.adapters.torch import Checkpointer

BATCH_SIZE = 8


class Endless(Sampler[int]):
    """Permutation after permutation; it says a length all the same, as some libraries' do."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rng = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from self.rng.permutation(self.length).tolist()

    def __len__(self) -> int:
        return self.length


class Job:
    """What all loops here have in common: the ranks, the digits, a classifier, a Checkpointer."""

    def __init__(
        self, directory: str, *, workers: str = "0", bucket_view: bool = False, **options: Any
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if self.num_ranks > 1:
            torch.distributed.init_process_group("gloo")
            torch.manual_seed(torch.distributed.get_rank() + 1)  # other dropout masks
        self.digits = Digits(160, augment=True)
        self.workers: dict[str, Any] = {
            "num_workers": 0 if workers == "0" else 1,
            "persistent_workers": workers == "persistent",
        }
        self.bare = nn.Sequential(
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
        )
        self.model: Any = self.bare
        if self.num_ranks > 1:
            for parameter in self.bare.parameters():
                torch.distributed.broadcast(parameter.data, src=0)
            self.model = nn.parallel.DistributedDataParallel(
                self.bare, gradient_as_bucket_view=bucket_view
            )
        self.optimizer = AdamW(self.bare.parameters(), lr=1e-2)
        self.checkpointer = Checkpointer(
            directory, model=self.model, optimizer=self.optimizer, strict=True, **options
        )

    def loader(self, first: int, last: int, *, seed: int | None = None) -> DataLoader[Any]:
        """A shuffled loader over some of the digits, sharded over the ranks."""
        data = Subset(self.digits, range(first, last))
        if self.num_ranks > 1:
            sampler = DistributedSampler(data, shuffle=True, seed=seed or 0)
            return DataLoader(data, BATCH_SIZE, sampler=sampler, **self.workers)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return DataLoader(data, BATCH_SIZE, shuffle=True, generator=generator, **self.workers)

    def loss(self, *batches: Any) -> torch.Tensor:
        images = torch.cat([images for images, _ in batches])
        labels = torch.cat([labels for _, labels in batches])
        return nn.functional.cross_entropy(self.model(images), labels)

    def step(self, *batches: Any) -> None:
        loss = self.loss(*batches)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.checkpointer.step(loss=loss)

    def close(self) -> None:
        self.checkpointer.close()


def train(directory: str, *, loop: str, workers: str = "0", save_every: int = 2) -> None:
    """Trains over several loaders in the way that ``loop`` names."""
    job = Job(directory, workers=workers, save_every=save_every)
    LOOPS[loop](job)
    job.close()


def _zipped(job: Job) -> None:
    loaders = {"labeled": job.loader(0, 48), "unlabeled": job.loader(48, 128, seed=7)}
    for batch in job.checkpointer.batches(loaders, epochs=2):
        job.step(batch["labeled"], batch["unlabeled"])


def _repeated(job: Job) -> None:
    labeled, others = job.loader(0, 48), job.loader(48, 80, seed=7)
    unlabeled = job.checkpointer.batches(others, name="unlabeled", repeat=True)
    for _ in job.checkpointer.epochs(2):
        random.random()
        for batch in job.checkpointer.batches(labeled):
            job.step(batch, next(unlabeled))


def _phases(job: Job) -> None:
    first, second = job.loader(0, 32), job.loader(32, 80, seed=7)
    for _ in job.checkpointer.epochs(2):
        for batch in job.checkpointer.batches(first, name="first"):
            job.step(batch)
        torch.rand(3)  # an evaluation between the phases
        for batch in job.checkpointer.batches(second, name="second"):
            job.step(batch)


def _rebuilt(job: Job) -> None:
    """A curriculum: each epoch has a loader, a seed and a length of its own."""
    for epoch in job.checkpointer.epochs(3):
        batches = job.loader(0, 32 + 16 * epoch, seed=epoch)
        for batch in job.checkpointer.batches(batches):
            job.step(batch)


def _endless(job: Job) -> None:
    sampler = Endless(40)
    batches = DataLoader(job.digits, BATCH_SIZE, sampler=sampler, **job.workers)
    for batch in job.checkpointer.batches(batches, steps=13):
        job.step(batch)


LOOPS = {
    "zipped": _zipped,
    "repeated": _repeated,
    "phases": _phases,
    "rebuilt": _rebuilt,
    "endless": _endless,
}


def accumulate(
    directory: str, *, mid_accumulation: str = "gradients", bucket_view: bool = False
) -> None:
    """Four micro-batches make a step; accumulation windows reach over the end of an epoch.

    In the middle of each accumulation window it asks for a save. Each rank sums up its gradients
    until the last micro-batch (``no_sync``).
    """
    settings: dict[str, Any] = {"save_every": None, "mid_accumulation": mid_accumulation}
    job = Job(directory, bucket_view=bucket_view, **settings)
    checkpointer = job.checkpointer
    batches = job.loader(0, 80 * job.num_ranks)  # 10 batches on each rank
    for batch in checkpointer.batches(batches, epochs=2):
        micro_step = checkpointer.progress.micro_step
        is_last = micro_step % 4 == 0
        within = job.num_ranks > 1 and not is_last
        with job.model.no_sync() if within else nullcontext():
            loss = job.loss(batch) / 4
            loss.backward()
        if is_last:
            job.optimizer.step()
            job.optimizer.zero_grad()
            checkpointer.step(loss=loss, tokens=micro_step)
        elif micro_step % 4 == 2:
            checkpointer.save()
    job.close()


def accumulate_with_accelerate(directory: str, *, mid_accumulation: Any = "gradients") -> None:
    """The same by ``accelerator.accumulate``, which ends a window with each epoch."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from resumekit.adapters.accelerate import Checkpointer

    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model: Any = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    data = Digits(80 * accelerator.num_processes, augment=True)
    batches: Any = DataLoader(data, BATCH_SIZE, shuffle=True)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
    torch.manual_seed(accelerator.process_index + 1)
    checkpointer = Checkpointer(
        accelerator, directory, save_every=None, mid_accumulation=mid_accumulation, strict=True
    )
    for images, labels in checkpointer.batches(batches, epochs=2):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        checkpointer.step(loss=loss, tokens=images.numel())
        if accelerator.step % 4 == 2:
            checkpointer.save()
    checkpointer.close()
