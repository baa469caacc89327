"""Ranks that do not agree, and ranks that die or stop while the others wait for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer


def disagree(directory: str, *, about: str) -> None:
    """Trains on two ranks, of which the second was started or written in another way."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    is_odd = torch.distributed.get_rank() == 1
    model = nn.Linear(2, 1)
    where = Path(directory) / ("b" if about == "directory" and is_odd else "a")
    options: dict[str, Any] = {"save_every": 4 if about == "option" and is_odd else 3}
    if about == "component" and is_odd:
        options["ema"] = nn.Linear(2, 1)
    checkpointer = Checkpointer(
        where,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        agreement_timeout_seconds=10,
        **options,
    )
    loader = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=1)
    epochs = 3 if about == "horizon" and is_odd else 2
    for (batch,) in checkpointer.batches(loader, epochs=epochs):
        model(batch).sum().backward()
        if about == "step" and is_odd and checkpointer.progress.step == 1:
            checkpointer.step()
        checkpointer.step()
        if about == "silence" and is_odd and checkpointer.progress.step == 2:
            os.kill(os.getpid(), 19)  # SIGSTOP
    checkpointer.close()
