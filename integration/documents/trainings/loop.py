"""540 steps of a loop; what ``resumekit doctor`` says about it stands on a page."""

import argparse
import os

import torch
from torch import distributed as dist
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumekit.adapters.torch import Checkpointer

parser = argparse.ArgumentParser()
parser.add_argument("directory", nargs="?", default="runs/a")
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--ema", action="store_true")
arguments = parser.parse_args()

torch.manual_seed(0)
data = TensorDataset(torch.randn(540, 8))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 8))
sampler = None
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=4, shuffle=sampler is None, sampler=sampler)
optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
average = {"ema": AveragedModel(model)} if arguments.ema else {}
gen = (0.0 for _ in range(10**9))

ckpt = Checkpointer(arguments.directory, save_every=20, keep_latest=4, keep_every=500, **average)
for (x,) in ckpt.batches(loader, epochs=4):
    loss = (model(x) - x).square().mean() + next(gen)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for each in average.values():
        each.update_parameters(model)
    ckpt.step(loss=loss)
if dist.is_initialized():
    dist.destroy_process_group()
