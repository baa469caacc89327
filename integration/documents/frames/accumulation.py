"""Stopped at micro-step 40, which is inside an accumulation window."""

import torch
from parts import LAUNCH, objects, record, stop_first_launch

from resumekit.adapters.torch import Checkpointer

model, optimizer, loader = objects(num_batches=32)


def loss_of(batch: list[torch.Tensor]) -> torch.Tensor:
    (x,) = batch
    loss = (model(x) - x).square().mean()
    record(loss)
    stop_first_launch(after=40)
    return loss


...  # fragment 6
