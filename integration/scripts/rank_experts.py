"""Experts that are sharded by rank: each rank trains one, and tokens go to it from all ranks.

torchrun --nproc-per-node=2 rank_experts.py --directory runs/experts --wrapper ddp

DDP does not synchronise the experts, and FSDP2 does not shard them. Without ``--per-rank
model,optimizer`` no save is possible.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from judged_script import arguments, record
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 40, 4, 3  # 5 steps an epoch on 2 ranks
WIDTH = 6


class FromAllRanks(torch.autograd.Function):
    """Concatenates the tensors of all ranks; the gradient of each is summed over the ranks."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        summed = gradient.contiguous()
        dist.all_reduce(summed)
        return summed.chunk(dist.get_world_size())[dist.get_rank()]


class Experts(nn.Module):
    """The expert of this rank; the router weighs those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, dist.get_world_size())
        self.expert = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        with torch.no_grad():  # each rank begins with an expert of its own
            for parameter in self.expert.parameters():
                parameter.add_(0.1 * dist.get_rank())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights = self.router(tokens).softmax(-1)
        of_expert = self.expert(FromAllRanks.apply(tokens))  # for the tokens of all ranks
        outputs = FromAllRanks.apply(of_expert).chunk(dist.get_world_size())  # of each expert
        number = dist.get_rank()
        mine = [output.chunk(dist.get_world_size())[number] for output in outputs]
        mixed = [weights[:, n, None] * output for n, output in enumerate(mine)]
        return torch.stack(mixed).sum(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.experts, self.last = Experts(), nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.experts(self.dropout(torch.tanh(self.first(inputs))))).squeeze(1)


def wrapped(model: Net, wrapper: str) -> nn.Module:
    """The model under DDP or FSDP2, but for its expert."""
    names = [name for name, _ in model.named_parameters() if ".expert." in name]
    if wrapper == "ddp":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        return DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ignored = {parameter for name, parameter in model.named_parameters() if name in names}
    return fully_shard(model, mesh=mesh, ignored_params=ignored)


def train(directory: str, *, wrapper: str = "ddp", **options: Any) -> None:
    """Trains and saves every 3 steps.

    Args:
        directory: the run directory.
        wrapper: ``ddp`` or ``fsdp2``.
        **options: of the adapter.
    """
    from resumekit.adapters.torch import Checkpointer

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, WIDTH)
    data = TensorDataset(inputs, inputs.sum(1) + inputs[:, 0] * inputs[:, 1])
    model = wrapped(Net(), wrapper)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
    loader = DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data))
    ckpt = Checkpointer(directory, model=model, optimizer=optimizer, save_every=3, **options)
    for inputs, targets in ckpt.batches(loader, epochs=EPOCHS):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(ckpt.progress.step + 1, loss=loss, optimizers=optimizer, inputs=inputs)
        ckpt.step(loss=loss)
    ckpt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    args = arguments("wrapper", "per-rank")
    names = set(args.per_rank.split(",")) - {""}
    train(args.directory, wrapper=args.wrapper, strict=args.strict, per_rank=names)
