"""A training function that keeps calling ``accelerator.save_state`` and ``load_state``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from digits import Digits
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from resumekit.adapters.accelerate import Checkpointer

NUM_SAMPLES = 92  # the last batch of an epoch is a partial one
BATCH_SIZE = 8


class Best:
    """A user's object of the kind that is given to ``register_for_checkpointing``."""

    def __init__(self) -> None:
        self.loss = 1e9

    def state_dict(self) -> dict[str, float]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.loss = state["loss"]


def newest_folder(directory: str) -> Path | None:
    """As scripts look for it: the one with the highest number."""
    folders = Path(directory, "states").glob("step_*")
    return max(folders, key=lambda path: int(path.name[5:]), default=None)


def prepared(directory: str, *, naming: str = "own", limit: int | None = None) -> Any:
    """All that a script has prepared and registered."""
    set_seed(0)
    configuration = ProjectConfiguration(
        directory, automatic_checkpoint_naming=naming == "automatic", total_limit=limit
    )
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
    )
    optimizer = AdamW(model.parameters(), lr=1e-2)
    scheduler = OneCycleLR(optimizer, max_lr=0.02, total_steps=100)
    loader = DataLoader(Digits(NUM_SAMPLES, augment=True), batch_size=BATCH_SIZE, shuffle=True)
    best = Best()
    accelerator.register_for_checkpointing(best)
    return accelerator, best, *accelerator.prepare(model, optimizer, loader, scheduler)


def train(
    directory: str,
    *,
    naming: str = "own",
    limit: int | None = None,
    load: bool = True,
    epochs: int = 2,
    save_every: int = 3,
) -> None:
    """Saves by ``save_state`` alone; the folder is written before the step is marked."""
    accelerator, best, model, optimizer, loader, scheduler = prepared(
        directory, naming=naming, limit=limit
    )
    checkpointer = Checkpointer(accelerator, f"{directory}/run", strict=True)
    torch.manual_seed(accelerator.process_index + 1)  # ranks draw different dropout masks
    if load and naming == "automatic" and os.path.isdir(f"{directory}/checkpoints"):
        accelerator.load_state()
    elif load and newest_folder(directory) is not None:
        accelerator.load_state(str(newest_folder(directory)))
    for images, labels in checkpointer.batches(loader, epochs=epochs):
        loss = nn.functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        best.loss = min(best.loss, loss.item())
        step = checkpointer.progress.step + 1
        if step % save_every == 0:
            name = None if naming == "automatic" else f"{directory}/states/step_{step}"
            accelerator.save_state(name)
        checkpointer.step(loss=loss)
    checkpointer.close()
