"""A stock training with Accelerate, which the test of the page "Migrate" changes as it says."""

import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
step = int(sys.argv[1]) if sys.argv[1:] else 0
config = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=True, dataloader_config=config)
data = TensorDataset(torch.randn(600, 8, generator=torch.Generator().manual_seed(0)))
loader = DataLoader(data, batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
criterion = nn.MSELoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if step:
    accelerator.load_state(f"checkpoints/step_{step}")
first_epoch, used = divmod(step, len(loader))
for epoch in range(first_epoch, 10):
    batches = accelerator.skip_first_batches(loader, used) if epoch == first_epoch else loader
    batches.set_epoch(epoch)
    for batch in batches:
        (inputs,) = batch
        loss = criterion(model(inputs), inputs)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 500 == 0:
            accelerator.save_state(f"checkpoints/step_{step}")
