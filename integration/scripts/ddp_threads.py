"""Sums over large tensors under DDP on 2 ranks: another number of threads adds in another order.

torchrun --nproc-per-node=2 ddp_threads.py --directory runs/threads

``--change yes`` scales the weights a little after each resume: such a run is not exact.
"""

from __future__ import annotations

import os

import torch
from judged_script import arguments, record
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.utils.data import DataLoader

from resumekit.adapters.torch import Checkpointer

NUM_STEPS, WIDTH, NUM_SAMPLES = 18, 300, 1000


def main() -> None:
    args = arguments("change")
    init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(range(NUM_STEPS), batch_size=None)
    ckpt = Checkpointer(args.directory, model=model, optimizer=optimizer, save_every=8)
    torch.manual_seed(int(os.environ["RANK"]))
    if ckpt.resume().resumed and args.change:
        with torch.no_grad():
            model.module.weight.mul_(1 + 2.0**-20)
    for i in ckpt.batches(loader, steps=NUM_STEPS):
        inputs, weights = torch.randn(2, NUM_SAMPLES, WIDTH).unbind()
        loss = (model(inputs) * weights).mean().square()  # its gradient holds the sum
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(i + 1, loss=loss, optimizers=optimizer, inputs=[inputs, weights])
        ckpt.step(loss=loss)
    ckpt.close()
    destroy_process_group()


if __name__ == "__main__":
    main()
