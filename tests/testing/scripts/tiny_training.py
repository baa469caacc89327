"""A training function that takes milliseconds, and is right or wrong in one known way."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from resumekit import Checkpointer, StateComponent

NUM_SAMPLES, BATCH_SIZE = 12, 2


class Number:
    """A component: one number, that of the last step included."""

    def __init__(self, wrong: bool = False, wrong_at_the_end: bool = False) -> None:
        self.value = 0.0
        self.wrong = wrong
        self.wrong_at_the_end = wrong_at_the_end
        self.is_last = False

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "is_last": self.is_last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.is_last = state["is_last"]
        if not self.wrong and not (self.wrong_at_the_end and self.is_last):
            self.value = state["value"]


def train(
    directory: str,
    *,
    save_every: int,
    wrong: str = "",
    count_samples: bool = False,
    num_epochs: int = 2,
) -> None:
    """Trains one number.

    Args:
        directory: the run directory.
        save_every: as for a ``Checkpointer``.
        wrong: ``model`` or ``optimizer`` (not restored), ``rng`` (a generator that is not saved),
            ``epochs`` (what happened in the epochs before is forgotten), ``end`` (the state of a
            finished run is not restored), ``starts over``, ``loses the newest`` (checkpoint),
            ``trains on`` (after its end) or ``hashes`` (depends on the seed of string hashes).
        count_samples: keep a count in the extras.
        num_epochs: how long.
    """
    random.seed(0)
    torch.manual_seed(0)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    data: Any = list(range(NUM_SAMPLES))
    sampler: Any = DistributedSampler(data) if world_size > 1 else None
    loader: DataLoader[int] = DataLoader(
        data, batch_size=BATCH_SIZE, sampler=sampler, shuffle=sampler is None
    )
    model = Number(wrong=wrong == "model", wrong_at_the_end=wrong == "end")
    optimizer = Number(wrong=wrong == "optimizer")
    extras: dict[str, Any] = {}
    if wrong == "starts over":
        directory = f"{directory}/{os.getpid()}"
    newest = max(Path(directory).glob("step-*"), default=None)
    is_finished = (Path(directory) / "finished").exists()
    if wrong == "loses the newest" and newest is not None and not is_finished:
        shutil.rmtree(newest)
    horizon = num_epochs
    if wrong == "trains on" and is_finished:
        horizon += 1
    checkpointer = Checkpointer(
        directory,
        components=[StateComponent("model", model), StateComponent("optimizer", optimizer)],
        extras=extras,
        save_every=save_every,
        allow_changes={"horizon"},
        transient={"noise", "epochs_seen"},  # what is not restored where that is wrong
    )
    noise = random.Random(0) if wrong == "rng" else random
    names = [f"name {number}" for number in range(1000)]
    if wrong == "hashes":
        names = list(set(names))
    last_step = num_epochs * len(loader)
    epochs_seen = set()
    for batch in checkpointer.batches(loader, epochs=horizon):
        progress = checkpointer.progress
        epochs_seen.add(progress.epoch)
        gradient = batch.sum().double()
        if world_size > 1:
            dist.all_reduce(gradient)
        offset = names.index("name 7") + (len(epochs_seen) if wrong == "epochs" else 0)
        optimizer.value = 0.9 * optimizer.value + float(gradient) * (1 + noise.random()) + offset
        model.value -= 0.01 * optimizer.value
        model.is_last = progress.step + 1 == last_step
        if count_samples:
            extras["num_samples"] = extras.get("num_samples", 0) + len(batch)
        checkpointer.step(loss=model.value)
    checkpointer.close()
    (Path(directory) / "finished").touch()
    if world_size > 1:
        dist.destroy_process_group()
