"""A small training run for fault injection: the whole state of a run, a few kilobytes of it."""

from __future__ import annotations

import logging
import os
import random
import sys
import traceback
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumekit.adapters.torch import Checkpointer

NUM_STEPS = 7
SAVE_EVERY = 3


def launch(directory: str, **options: Any) -> None:
    """Trains, and leaves at once.

    An interpreter with torch in it takes 0.2 seconds to take itself apart, and everything of the
    run is done and closed by then.
    """
    status = 0
    try:
        train(directory, **options)
    except Exception:  # noqa: BLE001 - printed as the interpreter would
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def train(
    directory: str,
    *,
    on_save_error: Any = "raise",
    on_full: Any = "raise",
    keep_latest: int = 1,
    save_every: int = SAVE_EVERY,
    async_save: bool = False,
    width: int = 8,
) -> None:
    """Trains seven steps and saves at the third, the sixth and the last.

    Args:
        directory: the run directory.
        on_save_error: see ``resumekit.run.options.Options``.
        on_full: the same.
        async_save: the same.
        save_every: the same.
        keep_latest: the same; 1 lets every save delete the checkpoint before it.
        width: of the hidden layer; a checkpoint has 120 bytes for each of its units.
    """
    if width > 8:
        logging.basicConfig()
        logging.getLogger("resumekit").setLevel(logging.DEBUG)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    data = TensorDataset(torch.arange(240.0).reshape(40, 6) / 240, torch.arange(40) % 3)
    sampler: Any = DistributedSampler(data, seed=3) if world_size > 1 else None
    loader = DataLoader(data, batch_size=4, sampler=sampler, shuffle=sampler is None)
    bare = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.2), nn.Linear(width, 3))
    model = nn.parallel.DistributedDataParallel(bare) if world_size > 1 else bare
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    extras = {"batches_seen": 0}
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        extras=extras,
        save_every=save_every,
        keep_latest=keep_latest,
        on_save_error=on_save_error,
        on_full=on_full,
        async_save=async_save,
    )
    with checkpointer:
        for inputs, labels in checkpointer.batches(loader, steps=NUM_STEPS):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            extras["batches_seen"] += 1
            checkpointer.step(loss=loss)
    if world_size > 1:
        torch.distributed.destroy_process_group()
