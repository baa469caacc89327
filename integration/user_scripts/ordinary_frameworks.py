"""Ordinary loops under Accelerate and DeepSpeed; see ``ordinary_loops``."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import numpy as np
import torch
from digits import Digits
from judged_script import record
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, DistributedSampler
from tqdm.auto import tqdm

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 80, 16, 2
SETTINGS: dict[str, Any] = {"save_every": 3, "strict": True}


class CachingCollator:
    """Stacks samples; what it was asked for is kept."""

    def __init__(self) -> None:
        self.cache: dict[int, torch.Tensor] = {}
        self.num_calls = 0

    def __call__(self, samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_calls += 1
        if len(samples) not in self.cache:
            self.cache[len(samples)] = torch.ones(len(samples), 1)
        images = torch.stack([image for image, _ in samples]) * self.cache[len(samples)]
        return images, torch.tensor([label for _, label in samples])


def make_model() -> nn.Module:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))


def accelerate_progress(directory: str) -> None:
    """The bar and the total loss of the no_trainer examples, with an evaluation per epoch."""
    from accelerate import Accelerator

    from resumekit.adapters.accelerate import Checkpointer

    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Digits(NUM_SAMPLES, augment=True)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, collate_fn=CachingCollator())
    eval_loader = DataLoader(Digits(40, augment=False), batch_size=20)
    scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    model, optimizer, loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, eval_loader, scheduler
    )
    ckpt = Checkpointer(accelerator, directory, **SETTINGS)
    progress = tqdm(range(EPOCHS * len(loader)), disable=not accelerator.is_local_main_process)
    for epoch in ckpt.epochs(EPOCHS):
        model.train()
        total_loss = 0.0
        batches = ckpt.batches(loader)
        for index, (inputs, labels) in enumerate(batches, start=batches.initial):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            total_loss += loss.detach().float()  # type: ignore[assignment]
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.update(1)
            step = epoch * len(loader) + index + 1
            record(step, loss=loss, optimizers=optimizer, inputs=inputs)
            ckpt.step(loss=loss)
        model.eval()
        correct = 0
        for inputs, labels in eval_loader:
            with torch.no_grad():
                guesses = model(inputs).argmax(1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            correct += (guesses == labels).sum().item()
        accelerator.print(f"epoch {epoch}: {correct / 40:.3f}, {total_loss / len(loader):.3f}")


def accelerate_accumulation(directory: str) -> None:
    """Windows by ``accumulate``, clipped, in bf16, timed."""
    from accelerate import Accelerator

    from resumekit.adapters.accelerate import Checkpointer

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16")
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Digits(NUM_SAMPLES, augment=True)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ckpt = Checkpointer(accelerator, directory, **SETTINGS)
    for epoch in ckpt.epochs(EPOCHS):
        started = time.perf_counter()
        batches = ckpt.batches(loader)
        for index, (inputs, labels) in enumerate(batches, start=batches.initial):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                step = (epoch * len(loader) + index + 1) // 2
                record(step, loss=loss, optimizers=optimizer, inputs=inputs)
            ckpt.step(loss=loss)
        accelerator.print(f"epoch {epoch} took {time.perf_counter() - started:.1f} s")


def deepspeed_running_loss(directory: str) -> None:
    """A running loss, a timer and rank 0's log line at ZeRO stage 1, on as many ranks as given."""
    import deepspeed
    from torch.distributed import destroy_process_group, get_rank, get_world_size

    from resumekit.adapters.deepspeed import Checkpointer

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if "RANK" not in os.environ:
        os.environ.update(alone)
    deepspeed.init_distributed("gloo")
    data = Digits(NUM_SAMPLES, augment=True)
    batch_size = BATCH_SIZE // get_world_size()
    loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))
    model = make_model()
    torch.manual_seed(get_rank())
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=lambda optimizer: StepLR(optimizer, step_size=4, gamma=0.5),
        config={
            "train_micro_batch_size_per_gpu": batch_size,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": 1},
        },
    )
    ckpt = Checkpointer(engine, directory, **SETTINGS)
    for epoch in ckpt.epochs(EPOCHS):
        running_loss, started = 0.0, time.time()
        batches = ckpt.batches(loader)
        for index, (inputs, labels) in enumerate(batches, start=batches.initial):
            loss = nn.functional.cross_entropy(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            running_loss += loss.item()
            if get_rank() == 0 and index % 2 == 1:
                print(f"[{epoch}, {index}] {running_loss / 2:.3f} {time.time() - started:.2f} s")
                running_loss = 0.0
            record(
                epoch * len(loader) + index + 1,
                loss=loss,
                optimizers=engine.optimizer,
                inputs=inputs,
                state={"model": [*engine.module.parameters()]},
            )
            ckpt.step(loss=loss)
    ckpt.close()
    destroy_process_group()
