"""A stock training with DeepSpeed, which the test of the page "Migrate" changes as it says."""

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(400, 8, generator=torch.Generator().manual_seed(0)))
model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
criterion = nn.MSELoss()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
loader = DataLoader(data, batch_size=4)
engine, *_ = deepspeed.initialize(model=model, config=config)
_, client_state = engine.load_checkpoint("checkpoints")
first_epoch = client_state["epoch"] if client_state else 0
for epoch in range(first_epoch, 10):
    for batch in loader:
        (inputs,) = batch
        loss = criterion(engine(inputs), inputs)
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint("checkpoints", client_state={"epoch": epoch + 1})
