"""Small programs that together use every kind of state of a plain loop, for mutated checkpoints."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resumekit import ResumeReport
from resumekit.adapters.torch import Checkpointer
from resumekit.serialization.digests import state_digest

T = TypeVar("T")

UNTIL = 9  # batches of the run
NUM_BATCHES = 4  # of an epoch
NUM_EPOCHS = 3


class Meter:
    """An object of the user's with a state, which a load checks as little as most do."""

    def __init__(self) -> None:
        self.total, self.history = 0.0, list[float]()
        self.best: float | None = None

    def add(self, value: float) -> None:
        self.total += value
        self.history.append(value)
        self.best = value if self.best is None else min(self.best, value)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "history": list(self.history), "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"] + 0.0
        self.history[:] = [each + 0.0 for each in state["history"]]
        self.best = state["best"]


class Samples(Dataset):
    """Samples with noise; it counts those that were read."""

    def __init__(self) -> None:
        self.inputs = torch.linspace(-1, 1, 96).reshape(16, 6)
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        noise = torch.rand(6) + random.random() + np.random.rand()
        return index, (self.inputs[index] + noise).float()


class Stream(IterableDataset):
    """The same samples without an index."""

    def __iter__(self) -> Iterator[Any]:
        samples = Samples()
        yield from (samples[index] for index in range(16))


class Positioned:
    """A loader with a state of its own."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < NUM_BATCHES:
            self.position += 1
            yield torch.arange(4), torch.full((4, 6), float(self.position)) + torch.rand(4, 6)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int(state["position"])


class Wrapping:
    """A loader of a framework."""

    def __init__(self, loader: Any) -> None:
        self.base_dataloader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.base_dataloader


def _shuffled() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(Samples(), batch_size=4, shuffle=True, generator=generator)


LOADERS: dict[str, Callable[[], Any]] = {
    "tape": _shuffled,
    "keyed": _shuffled,
    "replay": lambda: DataLoader(Stream(), batch_size=4),
    "stateful": Positioned,
    "wrapped": lambda: Wrapping(_shuffled()),
}


class Program:
    """The objects of one launch, and the loop.

    Args:
        kind: of the loader.
        directory: the run directory.
        seed: of what the script makes.
    """

    def __init__(self, kind: str, directory: Path, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        parts = [LinearLR(self.optimizer), CosineAnnealingLR(self.optimizer, 5)]
        self.scheduler = SequentialLR(self.optimizer, parts, milestones=[2])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
        self.ema = AveragedModel(self.model)
        self.generators: dict[str, Any] = {
            "noise": torch.Generator().manual_seed(seed),
            "numpy": np.random.default_rng(5),
            "legacy": np.random.RandomState(seed),
            "python": random.Random(seed),
        }
        self.extras: dict[str, Any] = {
            "note": f"seed {seed}",
            "list": [1, 2],
            "queue": deque([seed], maxlen=3),
            "table": {"a": 1.5, 3: ("x", None)},
            "tensor": torch.zeros(3),
            "array": np.zeros(2),
            "meter": Meter(),
        }
        self.loader = LOADERS[kind]()
        self.losses: list[str] = []
        self.checkpointer = Checkpointer(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            lr_scheduler=self.scheduler,
            grad_scaler=self.scaler,
            ema=self.ema,
            extras=self.extras,
            generators=self.generators,
            best_metric="score",
            keep_latest=None,
            save_every=None,
            mid_accumulation="gradients",
            randomness="keyed" if kind == "keyed" else "tape",
        )

    report: ResumeReport | None = None

    def run(self) -> dict[str, Any]:
        """Resumes and trains; gives the variables of the loop."""
        self.report = self.checkpointer.resume()
        return apart(partial(self.train, until=UNTIL))

    def abandon(self) -> None:
        """An error has ended it."""
        self.checkpointer._loop.abandon()

    def train(self, *, until: int | None = None) -> dict[str, Any]:
        """Trains, saving within accumulation windows; gives the variables of the loop."""
        smoothed, seen, meter = 0.0, [], Meter()
        with self.checkpointer as checkpointer:
            for epoch in checkpointer.epochs(NUM_EPOCHS):
                for number, (index, inputs) in enumerate(checkpointer.batches(self.loader)):
                    loss = self.model(inputs).square().mean() + self.extras["tensor"].sum()
                    self.scaler.scale(loss).backward()
                    smoothed = 0.5 * smoothed + loss.item()
                    seen.append((epoch, number, index.tolist()))
                    meter.add(smoothed)
                    is_step = checkpointer.progress.micro_step % 2 == 0
                    if is_step or checkpointer.progress.batch == NUM_BATCHES:
                        self.step(loss.item())
                    if checkpointer.progress.micro_step in (3, 7):
                        checkpointer.save()
                    if checkpointer.progress.micro_step == until:
                        break
                else:
                    continue
                break
        return {"smoothed": smoothed, "seen": seen, "meter": meter.state_dict()}

    def step(self, loss: float) -> None:
        """One optimizer step and all that follows it."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.ema.update_parameters(self.model)
        self.extras["tensor"] += torch.rand(3, generator=self.generators["noise"])
        self.extras["list"].append(self.generators["numpy"].random())
        self.extras["array"] = self.extras["array"] + self.generators["legacy"].rand(2)
        self.extras["queue"].append(self.generators["python"].random())
        self.extras["table"]["a"] += 1.0
        self.extras["meter"].add(loss)
        if self.checkpointer.progress.step < 2:  # each improvement makes a save
            self.checkpointer.report(score=loss)
        self.checkpointer.step(loss=loss)

    def digest(self) -> str:
        """Of every live object that a resume may change; found without the library's components."""
        values = {key: each for key, each in self.extras.items() if key != "meter"}
        states: dict[str, Any] = {
            "model": self.model.state_dict(),
            "gradients": [each.grad for each in self.model.parameters()],
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict(),
            "extras": {**values, "meter": vars(self.extras["meter"])},
            "random": (np.random.get_state(legacy=False), torch.get_rng_state()),
            "noise": self.generators["noise"].get_state(),
            "numpy": self.generators["numpy"].bit_generator.state,
            "legacy": self.generators["legacy"].get_state(legacy=False),
            # As text: each of their 625 numbers would be digested by itself.
            "python": repr((random.getstate(), self.generators["python"].getstate())),
        }
        return state_digest(states)


def apart(function: Callable[[], T]) -> T:
    """Calls it where no other function runs: the variables of callers belong to a loop too."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


def make_run(kind: str, directory: Path) -> Path:
    """A run directory with two checkpoints, both within an epoch and an accumulation window."""
    apart(partial(Program(kind, directory).train, until=UNTIL))
    return directory
