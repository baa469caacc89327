"""A loop that saves by ``dcp.save`` in the middle of an epoch, and the same under resumekit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from digits import Digits
from sharded_workloads import (
    GLOBAL_BATCH,
    NUM_SAMPLES,
    Classifier,
    gathered,
    in_a_process_group,
    laid_out,
    make_optimizer,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler

from resumekit.adapters.torch import Checkpointer

EPOCHS, PER_EPOCH = 3, NUM_SAMPLES // GLOBAL_BATCH
EPOCH, BATCH = 1, 2  # where it saves


@in_a_process_group
def train(
    directory: str, *, layout: str, how: str, optimizer: str = "adamw", flat: bool = False
) -> None:
    """Leaves the losses of each rank, and the whole weights and moments of some steps.

    Args:
        directory: for all that.
        layout: how the model is sharded.
        how: "stock" trains without resumekit and saves; else the run directory.
        optimizer: which one.
        flat: whether its state is saved with ``flatten_optimizer_state_dict``.
    """
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0 if how == "stock" else 99)
    bare = Classifier(tied=layout != "fsdp1")
    model, num_replicas, replica = laid_out(bare, layout, num_ranks)
    optim = make_optimizer(optimizer, model)
    scheduler = StepLR(optim, 2, gamma=0.7)
    data = Digits(NUM_SAMPLES, augment=False)
    sampler = DistributedSampler(data, num_replicas=num_replicas, rank=replica, seed=3)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // num_replicas, sampler=sampler)
    notes: dict[str, Any] = {"losses": [], "samples": []}

    def steps(batches: Any) -> Iterator[torch.Tensor]:
        for images, labels in batches:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optim.step()
            scheduler.step()
            optim.zero_grad()
            notes["losses"].append(loss.item())
            notes["samples"].append(images.clone())
            yield loss

    if how == "stock":
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for batch, _ in enumerate(steps(loader), 1):
                if (epoch, batch) == (EPOCH, BATCH):
                    notes["saved"] = gathered(model, optim, None)
                    _save(model, optim, scheduler, f"{directory}/saved", flat)
    else:
        given: dict[str, Any] = {"model": model, "optimizer": optim, "lr_scheduler": scheduler}
        checkpointer = Checkpointer(how, **given, save_every=None, allow_changes={"batch_size"})
        if num_ranks > 1:
            with torch.no_grad():
                model(data.images[:4])  # some layouts keep what they gather for it
        checkpointer.resume()
        notes["saved"] = gathered(model, optim, None)
        for loss in steps(checkpointer.batches(loader, epochs=EPOCHS)):
            checkpointer.step(loss=loss)
        checkpointer.close()
    notes["last"] = gathered(model, optim, None)
    torch.save(notes, Path(directory, f"notes-{rank}.pt"))


def _save(model: nn.Module, optim: Any, scheduler: Any, path: str, flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    of_model, of_optimizer = get_state_dict(model, optim, options=options)
    app = {"model": of_model, "optim": of_optimizer}
    state = {"app": app, "scheduler": scheduler.state_dict(), "step": EPOCH * PER_EPOCH + BATCH}
    dcp.save(state, checkpoint_id=path)
