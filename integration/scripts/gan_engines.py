"""A GAN with two DeepSpeed engines."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
from judged_script import arguments, record
from torch import nn
from torch.distributed import destroy_process_group, get_rank
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumekit.adapters.deepspeed import Checkpointer

ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
ONE_RANK |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
LATENT, WIDTH, BATCH_SIZE = 4, 6, 8


def make_engine(model: nn.Module, lr: float, stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "optimizer": {"type": "Adam", "params": {"lr": lr, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def main() -> None:
    args = arguments("stage")
    if "RANK" not in os.environ:
        os.environ.update(ONE_RANK)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(128, WIDTH, generator=generator) @ torch.randn(
        WIDTH, WIDTH, generator=generator
    )
    data = TensorDataset(samples)
    loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    generator_net = nn.Sequential(nn.Linear(LATENT, 16), nn.ReLU(), nn.Linear(16, WIDTH))
    discriminator_net = nn.Sequential(
        nn.Linear(WIDTH, 16), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
    )
    stage = int(args.stage or "1")
    g = make_engine(generator_net, 1e-2, stage)
    d = make_engine(discriminator_net, 2e-2, stage)
    torch.manual_seed(get_rank() + 10)
    criterion = nn.BCEWithLogitsLoss()

    ckpt = Checkpointer({"D": d, "G": g}, args.directory, save_every=3, strict=args.strict)
    for epoch in ckpt.epochs(2):
        batches = ckpt.batches(loader)
        for index, (real,) in enumerate(batches, start=batches.initial):
            ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
            fake = g(torch.randn(len(real), LATENT))
            loss_d = criterion(d(real), ones) + criterion(d(fake.detach()), zeros)
            d.backward(loss_d)
            d.step()
            d.module.requires_grad_(False)
            loss_g = criterion(d.module(fake), ones)
            g.backward(loss_g)
            g.step()
            d.module.requires_grad_(True)
            record(
                epoch * len(loader) + index + 1,
                loss=loss_d + loss_g,
                optimizers=[d.optimizer, g.optimizer],
                inputs=real,
                state={
                    "D": [*d.module.parameters()],
                    "G": [*g.module.parameters()],
                    "steps": [d.global_steps, g.global_steps],
                },
            )
            ckpt.step(loss=loss_d + loss_g)
    ckpt.close()
    destroy_process_group()


if __name__ == "__main__":
    main()
