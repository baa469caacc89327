"""Loads a checkpoint in a layout of this launch and saves it again, without a step in between."""

from __future__ import annotations

import os

import torch
from sharded_workloads import Classifier, in_a_process_group, laid_out, make_optimizer

from resumekit.adapters.torch import Checkpointer


@in_a_process_group
def resave(directory: str, *, layout: str, changed: bool = False) -> None:
    """One launch on as many ranks as the environment says.

    Args:
        directory: the run directory.
        layout: how the model is sharded.
        changed: whether one element of a bias becomes its next larger neighbour (plain layout).
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(99)  # what a launch begins with must not matter
    model, _, _ = laid_out(Classifier(), layout, num_ranks)
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=make_optimizer("adamw", model),
        extras={"steps": 0},
        allow_changes={"world_size"},
        keep_latest=None,
    )
    checkpointer.resume()
    if changed:
        last = model.get_parameter("head.bias").data[-1:]
        last.copy_(torch.nextafter(last, torch.tensor(9.0)))
    checkpointer.save()
    checkpointer.close()
