"""Two pipeline stages of two replicas each, on four ranks."""

from __future__ import annotations

from typing import Any

import torch
from parts import objects, record, stop_first_launch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.data import DataLoader, DistributedSampler


def objects_of_stages(
    num_stages: int,
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """What the stage of this rank trains, and the batches of its replica."""
    model, _, loader = objects()
    stage, copy = divmod(dist.get_rank(), dist.get_world_size() // num_stages)
    module = nn.Sequential()
    module.add_module(str(stage), model.get_submodule(str(2 * stage)))
    copies = DistributedSampler(loader.dataset, num_replicas=2, rank=copy)  # type: ignore[var-annotated]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return module, optimizer, DataLoader(loader.dataset, batch_size=4, sampler=copies)


class Stage:
    """Trains a stage with the others, and averages the gradients of its replicas."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh
    ) -> None:
        self._module, self._optimizer = module, optimizer
        self._copies = mesh.get_group("copies")
        self._index = mesh.get_local_rank("stages")
        group = mesh.get_group("stages")
        stage = PipelineStage(module, self._index, 2, torch.device("cpu"), group=group)
        self._pipeline = ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss)

    def train_on(self, batch: list[torch.Tensor]) -> None:
        """One step."""
        (x,) = batch
        losses: list[torch.Tensor] = []
        if self._index == 0:
            self._pipeline.step(x)
        else:
            self._pipeline.step(target=x, losses=losses)
        for parameter in self._module.parameters():
            dist.all_reduce(parameter.grad, group=self._copies)
        self._optimizer.step()
        self._optimizer.zero_grad()
        record(sum(losses) if losses else next(self._module.parameters()).sum())
        stop_first_launch()
