"""Training functions on Accelerate with several models, a compiled one, and ranks that differ."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from digits import Digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from resumekit.adapters.accelerate import Checkpointer

NUM_SAMPLES = 96
BATCH_SIZE = 8


def gan(
    directory: str,
    *,
    mark: bool = True,
    critic_batches: int = 1,
    epochs: int = 2,
    save_every: int = 3,
) -> None:
    """Two models and two optimizers; one scheduler is only registered.

    Args:
        directory: the run directory.
        mark: whether the loop says where a step ends.
        critic_batches: the batches on which the critic is trained, for one on which both are.
        epochs: of the run.
        save_every: steps between saves.
    """
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    generator: Any = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64))
    critic: Any = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(), nn.Dropout(0.2))
    critic.append(nn.Linear(32, 1))
    making: Any = AdamW(generator.parameters(), lr=2e-3)
    judging: Any = AdamW(critic.parameters(), lr=1e-3)
    schedule = StepLR(judging, 5, gamma=0.5)
    loader: Any = DataLoader(Digits(NUM_SAMPLES, augment=True), BATCH_SIZE, shuffle=True)
    generator, critic, making, judging, loader = accelerator.prepare(
        generator, critic, making, judging, loader
    )
    accelerator.register_for_checkpointing(schedule)
    torch.manual_seed(accelerator.process_index + 1)  # ranks draw different noise
    checkpointer = Checkpointer(accelerator, directory, save_every=save_every, strict=True)

    def judged(images: torch.Tensor, real: float) -> torch.Tensor:
        verdict = critic(images)
        return binary_cross_entropy_with_logits(verdict, torch.full_like(verdict, real))

    for images, _ in checkpointer.batches(loader, epochs=epochs):
        made = generator(torch.randn(len(images), 8))
        judging.zero_grad()
        critic_loss = judged(images, 1.0) + judged(made.detach(), 0.0)
        accelerator.backward(critic_loss)
        judging.step()
        schedule.step()
        if checkpointer.progress.micro_step % critic_batches:
            continue
        making.zero_grad()
        accelerator.backward(judged(made, 1.0))
        making.step()
        if mark:
            checkpointer.step(loss=critic_loss)
    checkpointer.close()


def compiled(
    directory: str, *, backend: str = "aot_eager", epochs: int = 2, save_every: int = 3
) -> None:
    """A model that ``prepare`` compiles, or one that is not."""
    set_seed(0)
    accelerator = Accelerator(cpu=True, dynamo_backend=backend)
    model: Any = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10))
    optimizer: Any = AdamW(model.parameters(), lr=1e-2)
    loader: Any = DataLoader(Digits(NUM_SAMPLES, augment=False), BATCH_SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    checkpointer = Checkpointer(accelerator, directory, save_every=save_every, strict=True)
    for images, labels in checkpointer.batches(loader, epochs=epochs):
        loss = cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(loss=loss)
    checkpointer.close()


def local_sgd(directory: str, *, save_every: int = 3, steps_apart: int = 4) -> None:
    """Ranks that train alone for some steps and then take the mean of their weights."""
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model: Any = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer: Any = SGD(model.parameters(), lr=0.05)
    loader: Any = DataLoader(Digits(NUM_SAMPLES, augment=True), BATCH_SIZE, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    checkpointer = Checkpointer(accelerator, directory, save_every=save_every, strict=True)
    averaging = LocalSGD(accelerator, model, local_sgd_steps=steps_apart, enabled=True)
    with averaging:
        for images, labels in checkpointer.batches(loader, epochs=4):
            loss = cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            averaging.step()
            checkpointer.step(loss=loss)
    checkpointer.close()
