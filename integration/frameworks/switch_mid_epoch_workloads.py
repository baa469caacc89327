"""One training in four frameworks: model, data, optimizer and schedule are the same.

The model stands under one name in each of them, so that a checkpoint of one is one of the others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from digits import Digits
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import Trainer, TrainingArguments

from resumekit.adapters.accelerate import Checkpointer as AccelerateCheckpointer
from resumekit.adapters.lightning import ResumeCallback as LightningCallback
from resumekit.adapters.torch import Checkpointer
from resumekit.adapters.transformers import ResumeCallback

NUM_SAMPLES = 60
BATCH_SIZE = 4
EPOCHS = 2
SAVE_EVERY = 2
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Images(Dataset[dict[str, Any]]):
    """Digits by name; with ``augment`` samples draw from all three global generators."""

    def __init__(self, *, augment: bool) -> None:
        self.digits = Digits(NUM_SAMPLES, augment=augment)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, label = self.digits[index]
        return {"images": image, "labels": label}


def make_net() -> nn.Module:
    """A small classifier with dropout."""
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10))


class Classifier(nn.Module):
    """It gives a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.net(images), labels)}


class LightningClassifier(LightningModule):
    """The same for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch["images"]), batch["labels"])

    def configure_optimizers(self) -> Any:
        optimizer, scheduler = make_optimizer(self)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def make_optimizer(model: nn.Module) -> tuple[AdamW, LambdaLR]:
    """The optimizer and its schedule."""
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return optimizer, LambdaLR(optimizer, _decay)


def _decay(step: int) -> float:
    return 0.95**step


def train(
    directory: str,
    *,
    framework: str,
    seedable: bool = False,
    augment: bool = False,
    workers: int = 0,
    randomness: str = "tape",
    epochs: int = EPOCHS,
    save_every: int = SAVE_EVERY,
    seed: int = 0,
) -> None:
    """Trains with dropout, AdamW and a schedule, on as many ranks as the environment says.

    Args:
        directory: the run directory.
        framework: ``"torch"``, ``"accelerate"``, ``"transformers"`` or ``"lightning"``.
        seedable: whether Accelerate orders the samples by a seed of its own.
        augment: whether samples draw random numbers.
        workers: of the loader.
        randomness: what they draw from.
        epochs: of the whole run.
        save_every: steps.
        seed: of everything.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"save_every": save_every, "randomness": randomness}
    data = Images(augment=augment)
    launch: dict[str, Callable[..., None]] = {
        "torch": in_plain_pytorch,
        "accelerate": in_accelerate,
        "transformers": in_the_trainer,
        "lightning": in_lightning,
    }
    more = {"seedable": seedable} if framework == "accelerate" else {}
    launch[framework](directory, data, workers, epochs, options, **more)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def in_plain_pytorch(
    directory: str, data: Images, workers: int, epochs: int, options: dict[str, Any]
) -> None:
    """The loop of plain PyTorch."""
    bare = Classifier()
    model: nn.Module = bare
    sampler = None
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(bare)
        sampler = DistributedSampler(data, seed=3)
    optimizer, scheduler = make_optimizer(bare)
    loader = DataLoader(
        data, BATCH_SIZE, shuffle=sampler is None, sampler=sampler, num_workers=workers
    )
    checkpointer = Checkpointer(
        directory, model=model, optimizer=optimizer, lr_scheduler=scheduler, **options
    )
    for batch in checkpointer.batches(loader, epochs=epochs):
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        checkpointer.step(loss=loss)
    checkpointer.close()


def in_accelerate(
    directory: str,
    data: Images,
    workers: int,
    epochs: int,
    options: dict[str, Any],
    *,
    seedable: bool,
) -> None:
    """The same with an Accelerator."""
    accelerator = Accelerator(
        cpu=True,
        step_scheduler_with_optimizer=False,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable),
    )
    model = Classifier()
    optimizer, scheduler = make_optimizer(model)
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=workers)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    checkpointer = AccelerateCheckpointer(accelerator, directory, **options)
    for batch in checkpointer.batches(loader, epochs=epochs):
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        checkpointer.step(loss=loss)
    checkpointer.close()


def in_the_trainer(
    directory: str, data: Images, workers: int, epochs: int, options: dict[str, Any]
) -> None:
    """The same with the Hugging Face Trainer."""
    model = Classifier()
    optimizer, scheduler = make_optimizer(model)
    arguments = TrainingArguments(
        output_dir=str(Path(directory).parent / "output"),
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH_SIZE,
        max_grad_norm=0,
        seed=0,
        dataloader_num_workers=workers,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    trainer = Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, scheduler))
    trainer.add_callback(ResumeCallback(trainer, directory, **options))
    trainer.train()


def in_lightning(
    directory: str, data: Images, workers: int, epochs: int, options: dict[str, Any]
) -> None:
    """The same with Lightning."""
    loader = DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=workers)
    trainer = LightningTrainer(
        max_epochs=epochs,
        callbacks=[LightningCallback(directory, **options)],
        default_root_dir=str(Path(directory).parent / "output"),
        **QUIET,
    )
    trainer.fit(LightningClassifier(), loader)
