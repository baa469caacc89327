"""Training functions whose loaders have other workers at every launch.

They are loops of the kind that people write, on scikit-learn's handwritten digits, with a dataset
and a collate function that draw from all three global generators.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digits import Digits
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    default_collate,
)

NUM_SAMPLES = 92  # the last batch of an epoch is a partial one
BATCH_SIZE = 8


class InBatches(Digits):
    """Gives whole batches."""

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        return [self[index] for index in indices]


class AsDicts(Dataset[dict[str, Any]]):
    """The same samples in the form that a Trainer takes."""

    def __init__(self) -> None:
        self.digits = Digits(NUM_SAMPLES, augment=True)

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.digits[index]
        return {"pixels": image, "labels": label}


def noisy_collate(samples: list[Any]) -> Any:
    """Moves all images of a batch by the same noise."""
    images, labels = default_collate(samples)
    scale = random.random() + float(np.random.rand())
    return images + 0.01 * scale * torch.randn(64), labels


def make_model() -> nn.Sequential:
    """A small classifier with dropout."""
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 10))


def launches_before(directory: str) -> int:
    """How often the function was started in this directory, by this rank."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    log = Path(directory) / f"launches-of-rank-{rank}"
    number = log.stat().st_size if log.exists() else 0
    with log.open("a") as file:
        file.write(".")
    return number


def seed_everything(seed: int) -> None:
    """Seeds what the script draws from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def worker_settings(workers: list[str], launch: int) -> dict[str, Any]:
    """What the launch of this number asks of its loader, e.g. ``"2 persistent spawn"``."""
    number, *words = workers[launch % len(workers)].split()
    methods = [word for word in words if word != "persistent"]
    return {
        "num_workers": int(number),
        "persistent_workers": "persistent" in words,
        "multiprocessing_context": methods[0] if methods else None,
    }


def make_loader(feed: str, settings: dict[str, Any], world_size: int) -> DataLoader[Any]:
    """The loader that the cell asks for."""
    kind = InBatches if feed == "whole batches" else Digits
    data = kind(NUM_SAMPLES, augment=True)
    generator = torch.Generator().manual_seed(11)
    if world_size > 1:
        sampler: Any = DistributedSampler(data, seed=3)
        return DataLoader(data, BATCH_SIZE, sampler=sampler, **settings)
    if feed == "replacement":
        sampler = RandomSampler(data, replacement=True, generator=generator)
        return DataLoader(data, BATCH_SIZE, sampler=sampler, **settings)
    collate = noisy_collate if feed == "collate" else None
    loader_generator = generator if feed == "generator" else None
    return DataLoader(
        data, BATCH_SIZE, shuffle=True, collate_fn=collate, generator=loader_generator, **settings
    )


def train(
    directory: str,
    *,
    workers: list[str],
    feed: str = "shuffle",
    randomness: Any = "keyed",
    epochs: int = 2,
    save_every: int = 3,
) -> None:
    """Trains in plain PyTorch, each launch from another seed."""
    from resumekit.adapters.torch import Checkpointer

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        torch.distributed.init_process_group("gloo")
    launch = launches_before(directory)
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    seed_everything(100 * launch + rank)
    bare = make_model()
    model = nn.parallel.DistributedDataParallel(bare) if world_size > 1 else bare
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = make_loader(feed, worker_settings(workers, launch), world_size)
    with Checkpointer(
        Path(directory) / "run",
        model=model,
        optimizer=optimizer,
        save_every=save_every,
        randomness=randomness,
        strict=randomness == "keyed",
    ) as run:
        for images, labels in run.batches(loader, epochs=epochs):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step(loss=loss)


def train_accelerate(
    directory: str, *, workers: list[str], epochs: int = 2, save_every: int = 3
) -> None:
    """Trains with Accelerate, whose loader is one batch ahead."""
    from accelerate import Accelerator

    from resumekit.adapters.accelerate import Checkpointer

    accelerator = Accelerator(cpu=True)
    launch = launches_before(directory)
    seed_everything(100 * launch + accelerator.process_index)
    bare = make_model()
    settings = worker_settings(workers, launch)
    model, optimizer, loader = accelerator.prepare(
        bare,
        torch.optim.AdamW(bare.parameters(), lr=1e-2),
        make_loader("generator", settings, 1),
    )
    with Checkpointer(
        accelerator,
        Path(directory) / "run",
        save_every=save_every,
        randomness="keyed",
        strict=True,
    ) as run:
        for images, labels in run.batches(loader, epochs=epochs):
            loss = nn.functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.step(loss=loss)


class Classifier(nn.Module):
    """A model in the form that a Trainer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layers(pixels)
        return {"loss": nn.functional.cross_entropy(outputs, labels), "logits": outputs}


def train_trainer(
    directory: str, *, workers: list[str], epochs: int = 2, save_every: int = 3
) -> None:
    """Trains with the Hugging Face Trainer."""
    from transformers import Trainer, TrainingArguments

    from resumekit.adapters.transformers import ResumeCallback

    launch = launches_before(directory)
    settings = worker_settings(workers, launch)
    arguments = TrainingArguments(
        output_dir=str(Path(directory) / "output"),
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=1e-2,
        save_strategy="no",
        seed=100 * launch,
        data_seed=5,
        dataloader_num_workers=settings["num_workers"],
        dataloader_persistent_workers=settings["persistent_workers"],
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(Classifier(), arguments, train_dataset=AsDicts())
    trainer.add_callback(
        ResumeCallback(
            trainer,
            Path(directory) / "run",
            save_every=save_every,
            randomness="keyed",
            strict=True,
        )
    )
    trainer.train()
