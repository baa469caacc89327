"""One training of the soak: ``python soak_training.py KIND DIRECTORY``, see ``soak.py``.

Each rank writes a ledger of its own: before a step ends, its number and the samples of its batch.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from soak import EPOCHS
from torch import nn
from torch.distributed import get_rank, get_world_size
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from resumekit.record.trace import RUN_ROOT_VARIABLE

BATCH_SIZE = 64
VOLUME_BYTES = 1 << 20  # room for a few checkpoints, each of 110 kB
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


# What each kind saves with: in the background, often, and to memory between two saves.
OPTIONS: dict[str, Any] = {
    "save_every": 5,
    "async_save": True,
    "on_full": "prune",
    "places": ["memory"],
}


def digits() -> Dataset[Any]:
    """Handwritten digits: float pixels, label, and the number of the sample."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).flatten(1) / 16
    return TensorDataset(images, torch.tensor(found.target), torch.arange(len(images)))


def note(directory: Path, step: int, samples: torch.Tensor) -> None:
    """Adds the batch of this step to the ledger, by one write."""
    names = ("ledger", os.environ.get("SOAK_LAUNCH"), os.environ.get("RANK", "0"))
    with (directory / f"{'-'.join(filter(None, names))}.txt").open("a") as file:
        file.write(f"{step}: {' '.join(map(str, samples.tolist()))}\n")


def network(dropout: float = 0.2) -> nn.Module:
    """Layers that draw random numbers."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 10))


def train_torch(directory: Path) -> None:
    """A plain loop, on each rank under DDP where a launcher has started several."""
    from resumekit.adapters.torch import Checkpointer

    is_distributed = "RANK" in os.environ
    if is_distributed:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(get_rank() if is_distributed else 0)
    data = digits()
    sampler: Any = DistributedSampler(data) if is_distributed else None
    loader = DataLoader(data, BATCH_SIZE, sampler=sampler, shuffle=sampler is None)
    model = network()
    if is_distributed:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ckpt = Checkpointer(directory / "run", model=model, optimizer=optimizer, **OPTIONS)
    with ckpt:
        for inputs, targets, samples in ckpt.batches(loader, epochs=EPOCHS):
            note(directory, ckpt.progress.step, samples)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(loss=loss)
    if is_distributed:
        torch.distributed.destroy_process_group()


def train_full(directory: Path, on_full: str) -> None:
    """A plain loop whose run directory is on a volume that is full again and again.

    With ``prune`` no checkpoint but for that is deleted, and the volume has room for a few. With
    ``skip`` another file takes its room at random times, also while a save is written. The
    uninterrupted run of `resumekit prove` has a disk with room.
    """
    from resumekit.adapters.torch import Checkpointer

    volume = Path(os.environ[RUN_ROOT_VARIABLE])
    if is_killed := volume.parent.name == "killed":
        mount(volume)
    torch.manual_seed(0)
    loader = DataLoader(digits(), BATCH_SIZE, shuffle=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"save_every": 5, "async_save": True, "on_full": on_full}
    if on_full == "prune":
        options["keep_latest"] = None
    last = EPOCHS * len(loader)
    with Checkpointer(directory / "run", model=model, optimizer=optimizer, **options) as ckpt:
        for inputs, targets, samples in ckpt.batches(loader, epochs=EPOCHS):
            note(directory, ckpt.progress.step, samples)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(loss=loss)
            if is_killed and on_full == "skip":
                fill_or_empty(volume, may_fill=ckpt.progress.step < last - 20)


def mount(volume: Path) -> None:
    """A small file system in memory, which outlives the process; there is no filler on it."""
    if not volume.is_mount():
        size = f"size={VOLUME_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(volume)], check=True)
    (volume / "filler").unlink(missing_ok=True)


def fill_or_empty(volume: Path, *, may_fill: bool) -> None:
    """Now and then fills a volume, but for less than a checkpoint, or frees what was filled.

    More often while a save is written, so that not only its check before it notices.
    """
    filler, chosen = volume / "filler", random.SystemRandom()
    if filler.exists():
        if not may_fill or chosen.random() < 0.2:
            filler.unlink()
    elif may_fill and chosen.random() < (0.7 if any(volume.glob("*/.staging/*")) else 0.15):
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 16, 1 << 12):
                with suppress(OSError):
                    while file.write(bytes(size)):
                        pass
            file.truncate(max(file.tell() - chosen.randrange(100_000), 0))


def train_elastic(directory: Path) -> None:
    """DDP on any number of ranks with the same global batch, in float64 and without dropout."""
    from resumekit.adapters.torch import Checkpointer

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    data = digits()
    data = Subset(data, range(len(data) // BATCH_SIZE * BATCH_SIZE))  # type: ignore[arg-type]
    sampler: Any = DistributedSampler(data)
    loader = DataLoader(data, BATCH_SIZE // get_world_size(), sampler=sampler)
    model = nn.parallel.DistributedDataParallel(network(0.0).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {**OPTIONS, "allow_changes": {"world_size", "batch_size"}}
    with Checkpointer(directory / "run", model=model, optimizer=optimizer, **options) as ckpt:
        for inputs, targets, samples in ckpt.batches(loader, epochs=EPOCHS):
            note(directory, ckpt.progress.step, samples)
            loss = nn.functional.cross_entropy(model(inputs.double()), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(loss=loss)
    if get_rank() == 0:
        save_file(model.module.state_dict(), directory / "weights.safetensors")
    torch.distributed.destroy_process_group()


def train_zero(directory: Path) -> None:
    """DeepSpeed at stage 2."""
    import deepspeed

    from resumekit.adapters.deepspeed import Checkpointer

    for name, value in ONE_RANK.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0")
    deepspeed.init_distributed("gloo")
    torch.manual_seed(get_rank())
    data = digits()
    size = BATCH_SIZE // get_world_size()
    loader = DataLoader(data, size, sampler=DistributedSampler(data))
    model = network()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": size,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": 2},
        },
    )
    with Checkpointer(engine, directory / "run", **OPTIONS) as ckpt:
        for inputs, targets, samples in ckpt.batches(loader, epochs=EPOCHS):
            note(directory, ckpt.progress.step, samples)
            loss = nn.functional.cross_entropy(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            ckpt.step(loss=loss)
    torch.distributed.destroy_process_group()


def train_lightning(directory: Path) -> None:
    """Lightning's Trainer."""
    import lightning

    from resumekit.adapters.lightning import ResumeCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, targets, samples = batch
            note(directory, self.global_step, samples)
            return nn.functional.cross_entropy(self.layers(inputs), targets)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        callbacks=[ResumeCallback(directory / "run", **OPTIONS)],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(digits(), BATCH_SIZE, shuffle=True))


def train_trainer(directory: Path) -> None:
    """The Trainer of transformers."""
    from transformers import Trainer, TrainingArguments, set_seed

    from resumekit.adapters.transformers import ResumeCallback

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = network()

        def forward(
            self, inputs: torch.Tensor, labels: torch.Tensor, samples: torch.Tensor
        ) -> dict[str, torch.Tensor]:
            note(directory, trainer.state.global_step, samples)
            logits = self.layers(inputs)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    set_seed(0)
    names = ("inputs", "labels", "samples")
    trainer = Trainer(
        Classifier(),
        TrainingArguments(
            output_dir=str(directory / "output"),
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=BATCH_SIZE,
            learning_rate=1e-2,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[dict(zip(names, each, strict=True)) for each in digits()],  # type: ignore[attr-defined]
    )
    ResumeCallback(trainer, directory / "run", **OPTIONS)
    trainer.train()


KINDS: dict[str, Callable[[Path], None]] = {
    "torch": train_torch,
    "ddp": train_torch,
    "trainer": train_trainer,
    "lightning": train_lightning,
    "zero": train_zero,
    "full-prune": partial(train_full, on_full="prune"),
    "full-skip": partial(train_full, on_full="skip"),
    "elastic": train_elastic,
}

if __name__ == "__main__":
    kind, given = sys.argv[1:]
    KINDS[kind](Path(given).absolute())
