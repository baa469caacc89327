"""Handwritten digits with DeepSpeed, as people write it; ``train_deepspeed.py`` is its twin.

    python stock_deepspeed.py
    python -m torch.distributed.run --nproc-per-node=2 stock_deepspeed.py --stage 1

The resume is the one of DeepSpeed's guide: ``save_checkpoint`` with the step (and here the averaged
weights) as ``client_state``, ``load_checkpoint``, and a loader that is taken forward to the step.
The line with ``resumekit.trace`` lets the judge look on, and does nothing without it.

There is no stage 3 here: no rank would hold whole weights that could be averaged.
"""

from __future__ import annotations

import argparse
import os

import deepspeed
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import destroy_process_group, get_rank, get_world_size
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import resumekit

ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="runs/digits")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2), default=1)
    arguments = parser.parse_args()

    if "RANK" not in os.environ:
        os.environ.update(ONE_RANK)
    deepspeed.init_distributed("gloo")
    torch.manual_seed(get_rank())  # the ranks draw different dropout masks
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    data = TensorDataset(images, torch.tensor(digits.target))
    batch_size = 64 // get_world_size()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, total_steps=arguments.epochs * len(loader)
        ),
        config={
            "train_micro_batch_size_per_gpu": batch_size,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": arguments.stage},
        },
    )
    ema = torch.optim.swa_utils.AveragedModel(
        engine.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )

    step = 0
    path, client_state = engine.load_checkpoint(arguments.directory)
    if path is not None:
        step = client_state["step"]
        ema.load_state_dict(client_state["ema"])

    for epoch in range(step // len(loader), arguments.epochs):
        sampler.set_epoch(epoch)
        for index, (inputs, targets) in enumerate(loader):
            if epoch * len(loader) + index < step:
                continue
            loss = nn.functional.cross_entropy(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            ema.update_parameters(engine.module)
            step += 1
            resumekit.trace(
                step,
                samples=inputs,
                loss=loss,
                model=engine.module,
                optimizer=engine.basic_optimizer,
                ema=ema,
            )
            if step % arguments.save_every == 0:
                client_state = {"step": step, "ema": ema.state_dict()}
                engine.save_checkpoint(arguments.directory, client_state=client_state)
        if get_rank() == 0:
            print(f"epoch {epoch}: last loss {loss.item()}")
    destroy_process_group()


if __name__ == "__main__":
    main()
