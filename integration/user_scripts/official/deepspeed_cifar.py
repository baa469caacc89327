"""A convolutional network with DeepSpeed, after its official CIFAR-10 tutorial.

Its own resume follows DeepSpeed's guide "Getting Started": ``load_checkpoint``, the step as client
state, and a loader that is taken forward to that step.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
from small_data import NUM_CLASSES, images
from torch import nn
from torch.utils.data import TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(16 * 2 * 2, NUM_CLASSES)

    def forward(self, x):
        x = self.pool(nn.functional.relu(self.conv1(x)))
        x = self.pool(nn.functional.relu(self.conv2(x)))
        return self.fc(self.dropout(x.flatten(1)))


def get_ds_config(args):
    return {
        "train_batch_size": 8,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.8, 0.999], "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 10},
        },
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": args.stage},
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--stage", type=int, default=0, choices=[0, 1, 2])
    parser.add_argument("--save_dir", default="checkpoints")
    parser.add_argument("--save_interval", type=int, default=5)
    args = parser.parse_args()

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model_engine, _, trainloader, _ = deepspeed.initialize(
        model=(net := Net()),
        model_parameters=net.parameters(),
        training_data=TensorDataset(*images(64)),
        config=get_ds_config(args),
    )

    first_step = 0
    path, client_sd = model_engine.load_checkpoint(args.save_dir)
    if path is not None:
        first_step = client_sd["step"]

    for epoch in range(args.epochs):
        for i, (inputs, labels) in enumerate(trainloader):
            step = epoch * len(trainloader) + i
            if step < first_step:
                continue
            loss = nn.functional.cross_entropy(model_engine(inputs), labels)
            model_engine.backward(loss)
            model_engine.step()
            if (step + 1) % args.save_interval == 0:
                model_engine.save_checkpoint(args.save_dir, client_state={"step": step + 1})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
