"""Batch norm under DDP on 2 ranks, with evaluations through the DDP module.

torchrun --nproc-per-node=2 ddp_evaluation.py --directory runs/ddp --case before
"""

from __future__ import annotations

import os

import torch
from judged_script import arguments, record
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import DataLoader

from resumekit.adapters.accelerate import Checkpointer as AccelerateCheckpointer
from resumekit.adapters.torch import Checkpointer

NUM_STEPS = 14


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(4, 10))
    model.train()


def main() -> None:
    """The cases: evaluate before the loop, also after ``resume()``, or measure statistics in it."""
    args = arguments("case")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = DataLoader(range(NUM_STEPS), batch_size=None)
    if args.case == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        ckpt = AccelerateCheckpointer(accelerator, args.directory, save_every=3)
    else:
        init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
        ckpt = Checkpointer(args.directory, model=model, optimizer=optimizer, save_every=3)
    torch.manual_seed(rank)
    if args.case == "resumed":
        ckpt.resume()
    if args.case != "inside":
        evaluate(model)
    for i in ckpt.batches(steps, steps=NUM_STEPS):
        inputs = torch.randn(4, 10) + rank
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(
            i + 1, loss=loss, optimizers=optimizer, inputs=inputs, state={"buffers": buffers(model)}
        )
        if args.case == "inside" and i % 2:
            with torch.no_grad():  # each rank's batch norm takes in its own samples
                model(inputs)
        ckpt.step(loss=loss)
    ckpt.close()
    destroy_process_group()


def buffers(model: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


if __name__ == "__main__":
    main()
