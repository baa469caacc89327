import os

import deepspeed
import torch
from parts import objects, record, stop_first_launch
from torch import nn

from resumekit.adapters.deepspeed import Checkpointer


def engine_of(model: nn.Module):
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
deepspeed.init_distributed("gloo")
_, _, loader = objects()
engine_g = engine_of(nn.Linear(8, 8))
engine_d = engine_of(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 1)))
...  # fragment 1
for (x,) in ckpt.batches(loader, epochs=3):
    fake = engine_g(torch.randn_like(x))
    loss_d = engine_d(fake.detach()).mean() - engine_d(x).mean()
    engine_d.backward(loss_d)
    engine_d.step()
    engine_d.module.requires_grad_(False)
    loss_g = -engine_d.module(fake).mean()
    engine_g.backward(loss_g)
    engine_g.step()
    engine_d.module.requires_grad_(True)
    record(loss_d)
    record(loss_g)
    stop_first_launch()
