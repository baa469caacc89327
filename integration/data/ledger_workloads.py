"""A training function that writes down what it is fed, by every kind of loader that people use.

What is written does not come from the library: the dataset gives each sample's index with it, and
the line is appended before the step is counted. Every epoch has six steps, whatever the loader.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from resumekit.adapters.torch import Checkpointer
from resumekit.data import DistributedResumableSampler, ResumableSampler

NUM_SAMPLES = 46  # the last batch of an epoch is a partial one
BATCH_SIZE = 8
STEPS_PER_EPOCH = 6
NUM_EPOCHS = 2
NUM_STEPS = NUM_EPOCHS * STEPS_PER_EPOCH
NUM_FEATURES = 4

Sample = tuple[torch.Tensor, int]


class Ledger:
    """A line for each step of this rank, in a file that all launches append to.

    Args:
        directory: where the file is.
        rank: of this process.
    """

    def __init__(self, directory: str, rank: int) -> None:
        path = os.path.join(directory, f"ledger-{rank}.jsonl")
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._rank = rank
        with open(path, encoding="utf-8") as file:
            self._launch = sum("begins" in line for line in file)
        self._append(begins=True)

    def write(self, step: int, epoch: int, batches: list[Any]) -> None:
        """What the step that is about to be counted was fed with."""
        digest = hashlib.sha256()
        indices: list[int] = []
        for rows, numbers in batches:
            digest.update(f"{rows.dtype}{tuple(rows.shape)}".encode())
            digest.update(rows.numpy().tobytes())
            indices += numbers.tolist()
        self._append(step=step, epoch=epoch, indices=indices, digest=digest.hexdigest())

    def _append(self, **fields: Any) -> None:
        line = json.dumps({"launch": self._launch, "rank": self._rank, **fields})
        os.write(self._file, line.encode() + b"\n")


# ---------------------------------------------------------------- datasets


def draw(augmentation: str) -> float:
    """A random number from the generator that the cell names."""
    if augmentation == "random":
        return random.random()
    if augmentation == "numpy":
        return float(np.random.rand())
    if augmentation == "torch":
        return float(torch.rand(()))
    return 0.0


class Rows(Dataset[Sample]):
    """Rows of numbers, each with its index; a sample is moved by what the augmentation draws."""

    def __init__(self, augmentation: str, *, first: int = 0, length: int = NUM_SAMPLES) -> None:
        numbers = torch.arange(first * NUM_FEATURES, (first + length) * NUM_FEATURES)
        self.rows = numbers.reshape(length, NUM_FEATURES).float() / 100
        self.first = first
        self.augmentation = augmentation

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.rows[index] + draw(self.augmentation), self.first + index


class RowsOfLists(Rows):
    """Gives a whole batch for a list of indices."""

    def __getitem__(self, indices: Any) -> Any:
        return default_collate([super(RowsOfLists, self).__getitem__(each) for each in indices])


class OneIsSlow(Rows):
    """The first sample keeps a worker busy."""

    def __getitem__(self, index: int) -> Sample:
        if index == 0 and get_worker_info() is not None:
            time.sleep(0.2)
        return super().__getitem__(index)


class Stream(IterableDataset[Sample]):
    """Each worker reads its own part, through a buffer that shuffles."""

    def __init__(self, augmentation: str) -> None:
        self.rows = Rows(augmentation)

    def __iter__(self) -> Iterator[Sample]:
        buffer: list[Sample] = []
        for index in my_share():
            buffer.append(self.rows[index])
            if len(buffer) > 6:
                yield buffer.pop(int(torch.randint(len(buffer), ())))
        yield from buffer


class PlacedStream(IterableDataset[Sample]):
    """Says where it is, and goes there."""

    def __init__(self, augmentation: str) -> None:
        self.rows = Rows(augmentation)
        self.used = 0

    def __iter__(self) -> Iterator[Sample]:
        mine = my_share()
        while self.used < len(mine):
            self.used += 1
            yield self.rows[mine[self.used - 1]]
        self.used = 0

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.used = state["used"]


def my_share() -> range:
    """The samples of this worker, or all of them where there are no workers."""
    info = get_worker_info()
    return range(NUM_SAMPLES) if info is None else range(info.id, NUM_SAMPLES, info.num_workers)


def table(augmentation: str) -> Any:
    """The same rows as a Dataset of Hugging Face."""
    from datasets import Dataset as Table

    rows = Rows("none")
    columns = {"row": rows.rows.tolist(), "index": list(range(NUM_SAMPLES))}
    return Table.from_dict(columns).with_transform(functools.partial(_moved, augmentation))


def _moved(augmentation: str, samples: dict[str, Any]) -> dict[str, Any]:
    moved = [torch.tensor(row) + draw(augmentation) for row in samples["row"]]
    return {"row": moved, "index": samples["index"]}


def buffered_stream(augmentation: str) -> Any:
    """The same rows as a stream in four shards, shuffled through a buffer."""
    from datasets import Dataset as Table

    columns = {"row": Rows("none").rows.tolist(), "index": list(range(NUM_SAMPLES))}
    stream = Table.from_dict(columns).to_iterable_dataset(num_shards=4)
    shuffled = stream.shuffle(seed=3, buffer_size=12)
    return shuffled.map(functools.partial(_one_moved, augmentation)).with_format("torch")


def _one_moved(augmentation: str, sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "row": np.asarray(sample["row"]) + draw(augmentation)}


# ---------------------------------------------------------------- samplers and loaders


class ShuffledByRandom(Sampler[int]):
    """A user-defined sampler, which draws from Python's generator."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(NUM_SAMPLES))
        random.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return NUM_SAMPLES


class ShuffledByNumpy(ShuffledByRandom):
    """A user-defined sampler, which draws from NumPy's generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(NUM_SAMPLES).tolist())


class DrawnAsItGoes(ShuffledByRandom):
    """A user-defined sampler, which draws each index when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(NUM_SAMPLES))
        while left:
            yield left.pop(random.randrange(len(left)))


class Buckets(Sampler[list[int]]):
    """Neighbours share a batch; the batches come in random order."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __iter__(self) -> Iterator[list[int]]:
        whole = list(range(NUM_SAMPLES))
        for number in self.rng.permutation(STEPS_PER_EPOCH).tolist():
            yield whole[number * BATCH_SIZE :][:BATCH_SIZE]

    def __len__(self) -> int:
        return STEPS_PER_EPOCH


class WithoutEnd(Sampler[int]):
    """Permutation after permutation."""

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from self.rng.sample(range(NUM_SAMPLES), NUM_SAMPLES)


class DrawingCollate:
    """Moves all rows of a batch by one more number."""

    def __init__(self, augmentation: str) -> None:
        self.augmentation = augmentation

    def __call__(self, samples: list[Sample]) -> Any:
        rows, numbers = default_collate(samples)
        return rows + draw(self.augmentation), numbers


class OwnLoader:
    """A user-defined loader with a state, which makes its batches here or has them made by workers.

    The loader inside has a generator, so that it draws no seed from the run's when it resumes.
    """

    def __init__(self, rows: Rows, num_workers: int) -> None:
        self.rows = rows
        self.num_workers = num_workers
        self.epoch = self.used = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(self.epoch).sample(range(NUM_SAMPLES), NUM_SAMPLES)
        left: Any = order[self.used * BATCH_SIZE :]
        settings: dict[str, Any] = {"num_workers": self.num_workers, "generator": torch.Generator()}
        for batch in DataLoader(self.rows, BATCH_SIZE, sampler=left, **settings):
            self.used += 1
            yield batch
        self.used = 0

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.used = state["used"]


@dataclass(frozen=True)
class Asked:
    """What a cell asks of its loader beside the kind.

    Args:
        augmentation: what each sample draws from.
        workers: of the loader, or of each loader.
        settings: more of the loader's settings.
    """

    augmentation: str
    workers: int
    settings: Mapping[str, Any]

    def rows(self, **part: int) -> Rows:
        return Rows(self.augmentation, **part)

    def loader(self, data: Any = None, **settings: Any) -> DataLoader[Any]:
        """A loader over all rows, or over other data."""
        whole = self._settings(settings)
        return DataLoader(self.rows() if data is None else data, **whole)

    def stateful(self, data: Any, **settings: Any) -> Any:
        """The same of torchdata."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        with warnings.catch_warnings():
            # torchdata 0.11 stateful_dataloader.py calls what torch 2.13 deprecates.
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")
            return StatefulDataLoader(data, **self._settings(settings))

    def shared(self, sampler: Callable[..., Sampler[int]]) -> DataLoader[Any]:
        """This rank's half, or the first one where there is one rank."""
        rows, rank = self.rows(), int(os.environ.get("RANK", "0"))
        half = sampler(rows, num_replicas=2, rank=rank, seed=3)
        return self.loader(rows, sampler=half, batch_size=BATCH_SIZE // 2)

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        size = {} if "batch_sampler" in settings else {"batch_size": BATCH_SIZE}
        return {**size, "num_workers": self.workers, **settings, **self.settings}


def seeded(seed: int = 11) -> torch.Generator:
    """A generator of the sampler's own."""
    return torch.Generator().manual_seed(seed)


def _shuffled(**settings: Any) -> Callable[[Asked], Any]:
    return lambda asked: asked.loader(shuffle=True, **settings)


def _sampled(make: Callable[[Rows], Any]) -> Callable[[Asked], Any]:
    def loader(asked: Asked) -> Any:
        rows = asked.rows()
        return asked.loader(rows, sampler=make(rows))

    return loader


def _whole_batches(asked: Asked) -> Any:
    sampler: Any = BatchSampler(RandomSampler(range(NUM_SAMPLES)), BATCH_SIZE, drop_last=False)
    return asked.loader(RowsOfLists(asked.augmentation), sampler=sampler, batch_size=None)


def _without_the_rest(asked: Asked) -> Any:
    rows = asked.rows(length=STEPS_PER_EPOCH * BATCH_SIZE + 2)
    return asked.loader(rows, shuffle=True, drop_last=True)


def _from_server(asked: Asked) -> Any:
    multiprocessing.set_forkserver_preload(["torch"])  # or each worker would take seconds for it
    return asked.loader(shuffle=True, multiprocessing_context="forkserver")


# What one loop goes over, by the name in docs/explanation/data.md.
LOADERS: dict[str, Callable[[Asked], Any]] = {
    "shuffle=True": _shuffled(),
    "RandomSampler with a generator": _sampled(
        lambda rows: RandomSampler(rows, generator=seeded())
    ),
    "RandomSampler, replacement=True": _sampled(
        lambda rows: RandomSampler(rows, replacement=True, num_samples=NUM_SAMPLES)
    ),
    "WeightedRandomSampler": _sampled(
        lambda rows: WeightedRandomSampler([1.0 + each % 3 for each in range(len(rows))], len(rows))
    ),
    "DistributedSampler": lambda asked: asked.shared(DistributedSampler),
    "ResumableSampler": _sampled(ResumableSampler),
    "DistributedResumableSampler": lambda asked: asked.shared(DistributedResumableSampler),
    "a Sampler of yours, drawing from random": _sampled(lambda rows: ShuffledByRandom()),
    "a Sampler of yours, drawing from numpy": _sampled(lambda rows: ShuffledByNumpy()),
    "a Sampler of yours that draws as it goes": _sampled(lambda rows: DrawnAsItGoes()),
    "a batch_sampler of yours": lambda asked: asked.loader(batch_sampler=Buckets()),
    "sampler=BatchSampler(...), batch_size=None": _whole_batches,
    "drop_last=True": _without_the_rest,
    "a collate_fn that draws": lambda asked: asked.loader(
        shuffle=True, collate_fn=DrawingCollate(asked.augmentation)
    ),
    "pin_memory=True": _shuffled(pin_memory=True),
    "prefetch_factor=4": _shuffled(prefetch_factor=4),
    "persistent_workers=True": _shuffled(persistent_workers=True),
    'multiprocessing_context="fork"': _shuffled(multiprocessing_context="fork"),
    'multiprocessing_context="spawn"': _shuffled(multiprocessing_context="spawn"),
    'multiprocessing_context="forkserver"': _from_server,
    "in_order=False": lambda asked: asked.loader(
        OneIsSlow(asked.augmentation), **{"in_order": False, **asked.settings}
    ),
    "a Dataset of datasets": lambda asked: asked.loader(table(asked.augmentation), shuffle=True),
    "an IterableDataset": lambda asked: asked.loader(Stream(asked.augmentation)),
    "a stream of datasets with a shuffle buffer": lambda asked: asked.loader(
        buffered_stream(asked.augmentation)
    ),
    "StatefulDataLoader": lambda asked: asked.stateful(asked.rows(), shuffle=True),
    "StatefulDataLoader over an IterableDataset": lambda asked: asked.stateful(
        PlacedStream(asked.augmentation)
    ),
    "an object of yours with a state": lambda asked: OwnLoader(asked.rows(), asked.workers),
}


# ---------------------------------------------------------------- loops


class Job:
    """A model to train, and the ledger of what it is fed."""

    def __init__(self, directory: str, asked: Asked, **options: Any) -> None:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        rank = int(os.environ.get("RANK", "0"))
        model: nn.Module = nn.Linear(NUM_FEATURES, 1)
        if num_ranks > 1:
            torch.distributed.init_process_group("gloo")
            model = nn.parallel.DistributedDataParallel(model)
        self.asked = asked
        self.ledger = Ledger(directory, rank)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.checkpointer = Checkpointer(
            f"{directory}/run", model=model, optimizer=self.optimizer, **options
        )

    def step(self, epoch: int, *batches: Any) -> None:
        """Trains on what came in one iteration, with random numbers of its own."""
        fed = [rows_and_indices(batch) for batch in batches]
        self.ledger.write(self.checkpointer.progress.step + 1, epoch, fed)
        noise = random.random() + float(np.random.rand()) + float(torch.rand(()))
        loss = sum(self.model(rows.float()).mean() for rows, _ in fed) * noise
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.checkpointer.step()


def rows_and_indices(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What every loader gives, in whichever form."""
    rows, numbers = (batch["row"], batch["index"]) if isinstance(batch, dict) else batch
    return rows, numbers


def _one_loader(job: Job, loader: Any) -> None:
    checkpointer = job.checkpointer
    for batch in checkpointer.batches(loader, epochs=NUM_EPOCHS):
        job.step(checkpointer.progress.epoch, batch)


def _in_step(job: Job) -> None:
    longer = job.asked.rows(first=NUM_SAMPLES, length=NUM_SAMPLES + 9)
    loaders = {
        "one": job.asked.loader(shuffle=True),
        "other": job.asked.loader(longer, shuffle=True, generator=seeded()),
    }
    checkpointer = job.checkpointer
    for batch in checkpointer.batches(loaders, epochs=NUM_EPOCHS):
        job.step(checkpointer.progress.epoch, batch["one"], batch["other"])


def _in_turn(job: Job) -> None:
    half = NUM_SAMPLES // 2
    loaders = [
        job.asked.loader(job.asked.rows(first=first, length=half), shuffle=True)
        for first in (0, half)
    ]
    checkpointer = job.checkpointer
    for epoch in checkpointer.epochs(NUM_EPOCHS):
        one, other = (
            checkpointer.batches(loader, name=name)
            for name, loader in zip(("one", "other"), loaders, strict=True)
        )
        for batch in one:
            job.step(epoch, batch)
            job.step(epoch, next(other))


def _without_end(job: Job) -> None:
    loader = job.asked.loader(sampler=WithoutEnd())
    checkpointer = job.checkpointer
    for batch in checkpointer.batches(loader, steps=NUM_STEPS):
        job.step(checkpointer.progress.epoch, batch)


def _rebuilt(job: Job) -> None:
    for epoch in job.checkpointer.epochs(NUM_EPOCHS):
        for batch in job.checkpointer.batches(job.asked.loader(shuffle=True)):
            job.step(epoch, batch)


def _curriculum(job: Job) -> None:
    asked = job.asked
    for epoch in job.checkpointer.epochs(NUM_EPOCHS):
        if epoch == 0:
            loader = asked.loader(generator=seeded(), shuffle=True)
        else:
            rows = asked.rows(first=NUM_SAMPLES, length=22)
            sampler = WeightedRandomSampler([1.0] * 11 + [3.0] * 11, 22)
            loader = asked.loader(rows, sampler=sampler, batch_size=4)
        for batch in job.checkpointer.batches(loader):
            job.step(epoch, batch)


def _changed(job: Job) -> None:
    rows = job.asked.rows()
    loader = job.asked.loader(rows, shuffle=True)
    for epoch in job.checkpointer.epochs(NUM_EPOCHS):
        for batch in job.checkpointer.batches(loader):
            job.step(epoch, batch)
        rows.rows += 1


LOOPS: dict[str, Callable[[Job], None]] = {
    "a dict of two loaders": _in_step,
    "two loaders in turn": _in_turn,
    "an endless loader, steps=N": _without_end,
    "a loader recreated in each epoch": _rebuilt,
    "another loader in each epoch": _curriculum,
    "a Dataset that training changes between epochs": _changed,
}


def train(
    directory: str,
    *,
    kind: str,
    workers: int,
    augmentation: str,
    settings: Mapping[str, Any] | None = None,
    save_every: int = 1,
    randomness: str = "tape",
) -> None:
    """Trains two epochs on what a loader of this kind gives."""
    asked = Asked(augmentation, workers, settings or {})
    job = Job(directory, asked, save_every=save_every, randomness=randomness)
    if kind in LOOPS:
        LOOPS[kind](job)
    else:
        _one_loader(job, LOADERS[kind](asked))
    job.checkpointer.close()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    # Everything is on the disk. To take the interpreter down would be most of a launch's time.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
