"""Training functions on Accelerate that the conformance kit launches, kills and compares.

They are loops of the kind that people write, on scikit-learn's handwritten digits; the options are
the factors of the test matrix. None looks at whether it was started before.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from annealed import Annealed
from digits import Digits
from frozen_backbone import frozen_backbone
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from resumekit.adapters.accelerate import Checkpointer
from resumekit.state import ComponentState, WorldChange

NUM_SAMPLES = 92  # the last batch of an epoch is a partial one
BATCH_SIZE = 8


class Curriculum(ComponentState):
    """A user's object of the kind that is given to ``register_for_checkpointing``."""

    def __init__(self) -> None:
        self.hardest_loss = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"hardest_loss": self.hardest_loss}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.hardest_loss = state["hardest_loss"]

    def resplit_state_dict(
        self, states: Mapping[int, dict[str, float]], change: WorldChange
    ) -> tuple[dict[str, float], tuple[str, ...]]:
        return {"hardest_loss": max(state["hardest_loss"] for state in states.values())}, ()


def make_loader(augment: bool, kind: str, workers: str) -> DataLoader[Any]:
    """A loader before it is prepared."""
    return DataLoader(
        Digits(NUM_SAMPLES, augment=augment),
        batch_size=BATCH_SIZE,
        shuffle=True,
        generator=torch.Generator().manual_seed(11) if kind == "generator" else None,
        num_workers=0 if workers == "0" else 2,
        persistent_workers=workers == "persistent",
    )


def train(
    directory: str,
    *,
    loader: str = "shuffle",
    workers: str = "0",
    augment: bool = False,
    accumulate: int = 1,
    scheduler: str = "prepared",
    dispatch: bool | None = None,
    split: bool = False,
    even: bool = True,
    stateful: bool = False,
    precision: str = "no",
    scaler: bool = False,
    loop: str = "batches",
    mark: bool = True,
    report: bool = False,
    annealed: bool = False,
    allow: Any = None,
    epochs: int = 2,
    save_every: int = 3,
    async_save: bool = False,
    frozen: bool = False,
) -> None:
    """Trains a small classifier with dropout, AdamW and averaged weights."""
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(
            use_seedable_sampler=loader == "seedable",
            dispatch_batches=dispatch,
            split_batches=split,
            even_batches=even,
            use_stateful_dataloader=stateful,
        ),
    )
    if scaler:
        # accelerate 1.15 accelerator.py makes one for fp16, which it refuses without a GPU.
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
    dropout = Annealed(32) if annealed else nn.Dropout(0.3)
    bare = nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), dropout, nn.Linear(32, 10)
    )
    if frozen:
        bare.insert(0, frozen_backbone())
    optim = AdamW([each for each in bare.parameters() if each.requires_grad], lr=1e-2)
    schedule: Any = OneCycleLR(optim, max_lr=0.02, total_steps=100)
    curriculum = Curriculum()
    batches = make_loader(augment, loader, workers)
    model, optim, batches = accelerator.prepare(bare, optim, batches)
    if scheduler == "prepared":
        schedule = accelerator.prepare(schedule)
    else:
        accelerator.register_for_checkpointing(schedule)
    accelerator.register_for_checkpointing(curriculum)
    average = AveragedModel(bare, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    torch.manual_seed(accelerator.process_index + 1)  # ranks draw different dropout masks

    extras = {"batches_seen": 0}
    checkpointer = Checkpointer(
        accelerator,
        directory,
        ema=average,
        extras=extras,
        save_every=save_every,
        best_metric="loss" if report else None,
        allow_changes=allow or (),
        strict=True,
        async_save=async_save,
        keep_latest=None if frozen else 2,
    )

    def one_batch(images: torch.Tensor, labels: torch.Tensor) -> None:
        extras["batches_seen"] += 1
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images).float(), labels)
            accelerator.backward(loss)
            optim.step()
            if scheduler == "prepared" or accelerator.sync_gradients:
                schedule.step()
            optim.zero_grad()
        curriculum.hardest_loss = max(curriculum.hardest_loss, loss.item())
        if accelerator.sync_gradients:
            average.update_parameters(bare)
        if mark:
            checkpointer.step(loss=loss, tokens=images.numel())

    if loop == "batches":
        for images, labels in checkpointer.batches(batches, epochs=epochs):
            one_batch(images, labels)
            if report and checkpointer.progress.step % 5 == 0:
                checkpointer.report(loss=random.random())
    else:
        for _ in checkpointer.epochs(epochs):
            np.random.random()
            for images, labels in checkpointer.batches(batches):
                one_batch(images, labels)
    checkpointer.close()
