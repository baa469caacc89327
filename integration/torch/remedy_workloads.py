"""A training on two ranks that are started in a wrong way, or as the remedy says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumekit.adapters.torch import Checkpointer


def train(
    directory: str,
    *,
    where: str,
    about: str = "",
    leave_after: int = 0,
    seconds: int = 10,
    options: dict[str, Any] | None = None,
) -> None:
    """Trains to step 6; the second rank does what it is asked ``about``."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if about != "no group" and world_size > 1:
        torch.distributed.init_process_group("gloo")
    if about == "interface":
        os.environ["GLOO_SOCKET_IFNAME"] = "nonexistent"
    torch.manual_seed(0)
    is_wrong = about if rank == 1 else ""
    model = nn.Linear(2, 1)
    path = Path(where) / ("other" if is_wrong == "directory" else "run")
    given: dict[str, Any] = {"save_every": 4 if is_wrong == "option" else 1, **(options or {})}
    if about == "group":
        given["data_parallel_group"] = [1] if rank else [0, 1]
    checkpointer = Checkpointer(
        path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        agreement_timeout_seconds=seconds,
        transient={"leave_after", "about", "is_wrong"},
        loop_variables="off",
        **given,
    )
    data = TensorDataset(torch.randn(24, 2))
    loader = DataLoader(data, sampler=DistributedSampler(data, world_size, rank), batch_size=1)
    for (batch,) in checkpointer.batches(loader, steps=6):
        model(batch).sum().backward()
        for parameter in model.parameters() if world_size > 1 else ():
            torch.distributed.all_reduce(parameter.grad)
        if checkpointer.progress.step == 1:
            if is_wrong == "replicas":
                model.bias.data += 1
            elif is_wrong == "step":
                checkpointer.step()
        checkpointer.step()
        if checkpointer.progress.step == leave_after:
            break
    checkpointer.close()
