"""Tensor parallel on 2 ranks, without a call of ``zero_grad``: gradients add up over all steps.

torchrun --nproc-per-node=2 tensor_parallel.py --directory runs/tp
"""

from __future__ import annotations

import os

import torch
from judged_script import arguments, record
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

from resumekit.adapters.torch import Checkpointer

NUM_STEPS = 14


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Linear(10, 32)
        self.contract = nn.Linear(32, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.contract(torch.relu(self.expand(inputs)))


def main() -> None:
    args = arguments()
    init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    torch.manual_seed(0)
    plan = {"expand": ColwiseParallel(), "contract": RowwiseParallel()}
    model = parallelize_module(FeedForward(), mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    ckpt = Checkpointer(
        args.directory,
        model=model,
        optimizer=optimizer,
        data_parallel_group=[int(os.environ["RANK"])],  # all ranks take the same data
        save_every=3,
        strict=args.strict,
    )
    for i in ckpt.batches(DataLoader(range(NUM_STEPS), batch_size=None), steps=NUM_STEPS):
        inputs = torch.rand(4, 10)
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        gradients = [parameter.grad for parameter in model.parameters()]
        record(
            i + 1, loss=loss, optimizers=optimizer, inputs=inputs, state={"gradients": gradients}
        )
        ckpt.step(loss=loss)
    ckpt.close()
    destroy_process_group()


if __name__ == "__main__":
    main()
