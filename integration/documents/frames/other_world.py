"""Two ranks stop inside the first epoch; one finishes it with the samples that are left."""

import torch
from parts import LAUNCH, objects, record, stop_first_launch
from torch import distributed as dist
from torch.utils.data import DataLoader

data = [torch.full((8,), index / 64) for index in range(64)]
if LAUNCH < 2:
    dist.init_process_group("gloo")
model, optimizer, _ = objects()
...  # fragment 3
for batch in ckpt.batches(loader, epochs=1):
    for sample in batch:
        record(sample[0])
    loss = (model(batch) - batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if LAUNCH < 2:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    optimizer.step()
    stop_first_launch(after=16)
