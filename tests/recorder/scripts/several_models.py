"""Trains two models with two optimizers; nothing of resumekit is in it.

Accumulation, dropout, buffers, gradient scaling with a skipped step, an averaged model, a model of
NumPy and Python random numbers: all that a recorder could disturb. Prints a digest of the result.
"""

from __future__ import annotations

import hashlib
import random
import sys

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.head = nn.Linear(8, 4)

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
first, second = Model(), nn.Linear(4, 1)
optimizers = [torch.optim.AdamW(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.1)]
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=3)
averaged = AveragedModel(first)
criterion = nn.MSELoss()
for step in range(1, 7):
    noise = random.random() + float(np.random.rand())
    for _ in range(2):
        x = torch.randn(8, 4) * noise
        loss = criterion(first(x=x), x)
        loss = loss * float("inf") if step == 3 else loss
        scaler.scale(loss / 2).backward()
    scaler.step(optimizers[0])
    scaler.update()
    optimizers[0].zero_grad()
    averaged.update_parameters(first)
    optimizers[1].zero_grad()
    second(first(x=x).detach()).square().mean().backward()
    optimizers[1].step()

if "--fail" in sys.argv:
    raise SystemExit(3)
state = [*first.state_dict().values(), *second.state_dict().values()]
state += [*averaged.state_dict().values(), torch.get_rng_state()]
text = f"{random.getstate()} {np.random.get_state()}"
data = b"".join(each.numpy().tobytes() for each in state) + text.encode()
sys.stdout.write(f"{hashlib.sha256(data).hexdigest()}\n")
