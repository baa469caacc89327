"""Training functions for exports: one saves a step in both ways, the other is a stock script."""

from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, extract_model_from_parallel
from digits import Digits
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

NUM_SAMPLES, BATCH_SIZE = 92, 8
SAVED_AT = 15  # in the second epoch of one rank, and in the third of two
NUM_MORE = 4
NATIVE = "native"
SHARDED_AT = 3


class Net(nn.Module):
    """Frozen and tied weights, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(64, 32)
        self.frozen.requires_grad_(False)
        self.hidden = nn.Linear(32, 32, bias=False)
        self.tied = nn.Linear(32, 32, bias=False)
        self.tied.weight = self.hidden.weight
        self.norm = nn.BatchNorm1d(32)
        self.dropout = nn.Dropout(0.3)
        self.last = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(self.frozen(images.to(self.last.weight.dtype))).relu()
        return self.last(self.dropout(self.norm(self.tied(hidden))))


class Curriculum:
    """A user's object for ``register_for_checkpointing``."""

    def __init__(self) -> None:
        self.hardest = {"loss": 0.0}

    def state_dict(self) -> dict[str, float]:
        return dict(self.hardest)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.hardest = dict(state)


class Script:
    """All that the script of either function makes."""

    def __init__(self, *, dtype: str, two: bool, scaler: bool, registered: bool) -> None:
        seeded = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
        self.accelerator = Accelerator(cpu=True, dataloader_config=seeded)
        if scaler:
            # accelerate 1.15 accelerator.py makes one for fp16, which it refuses without a GPU.
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        self.bare = Net().to(getattr(torch, dtype))
        trained = [each for each in self.bare.parameters() if each.requires_grad]
        optimizers: list[Any] = [AdamW(trained[2:] if two else trained, lr=1e-2)]
        if two:
            optimizers.insert(0, SGD(trained[:2], lr=1e-2, momentum=0.9))
        schedulers: list[Any] = [OneCycleLR(e, max_lr=0.02, total_steps=200) for e in optimizers]
        self.model, self.loader, *prepared = self.accelerator.prepare(
            self.bare,
            DataLoader(Digits(NUM_SAMPLES, augment=False), batch_size=BATCH_SIZE, shuffle=True),
            *optimizers,
            *(() if registered else schedulers),
        )
        self.optimizers = prepared[: len(optimizers)]
        self.schedulers = schedulers if registered else prepared[len(optimizers) :]
        self.curriculum = Curriculum()
        if registered:
            self.accelerator.register_for_checkpointing(*schedulers, self.curriculum)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(images).float(), labels)
        self.accelerator.backward(loss)
        for each in (*self.optimizers, *self.schedulers):
            each.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.curriculum.hardest["loss"] = max(self.curriculum.hardest["loss"], loss.item())
        return loss.detach()

    def states(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {
            "model": self.bare.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "schedulers": [each.state_dict() for each in self.schedulers],
            "scaler": None if scaler is None else scaler.state_dict(),
            "curriculum": self.curriculum.state_dict(),
        }


def save_both(directory: str, **options: Any) -> None:
    """Saves a step by ``save_state`` and as a checkpoint of resumekit."""
    from resumekit.adapters.accelerate import Checkpointer

    torch.manual_seed(0)
    script = Script(**options)
    torch.manual_seed(script.accelerator.process_index + 1)
    checkpointer = Checkpointer(script.accelerator, Path(directory) / "run", save_every=1000)
    for images, labels in checkpointer.batches(script.loader, epochs=4):
        if checkpointer.progress.step == SAVED_AT + 1:
            break
        loss = script.step(images, labels)
        if checkpointer.progress.step + 1 == SAVED_AT:
            script.accelerator.save_state(str(Path(directory) / NATIVE))
        checkpointer.step(loss=loss)


def continue_from(directory: str, *, source: str, **options: Any) -> None:
    """A script without resumekit, which begins from a folder of ``save_state``.

    Its random numbers are others in each launch until ``load_state`` restores them.
    """
    torch.seed()
    script = Script(**options)
    accelerator = script.accelerator
    accelerator.load_state(str(Path(directory) / source))
    loaded = copy.deepcopy(script.states())
    epoch, skipped = divmod(SAVED_AT, len(script.loader))
    script.loader.set_epoch(epoch)
    loader = accelerator.skip_first_batches(script.loader, skipped)
    losses = [script.step(*batch) for batch in islice(loader, NUM_MORE)]
    notes = {"loaded": loaded, "losses": losses, **script.states(), "step": accelerator.step}
    assert extract_model_from_parallel(script.model) is script.bare
    torch.save(notes, Path(directory) / f"{source}-{accelerator.process_index}.pt")


def whole_states(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Weights and moments by name, whole; collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    moments = get_optimizer_state_dict(model, optimizer, options=options)
    return {"model": weights, "moments": moments.get("state")}  # rank 0 alone has them


def prepare_whole_or_sharded(accelerator: Accelerator) -> tuple[Any, Any, Any]:
    model = nn.Sequential(nn.Linear(64, 33), nn.LayerNorm(33), nn.ReLU(), nn.Linear(33, 10))
    optimizer = AdamW(model.parameters(), lr=1e-2, foreach=False)
    loader = DataLoader(Digits(NUM_SAMPLES, augment=False), batch_size=BATCH_SIZE, shuffle=True)
    return accelerator.prepare(model, optimizer, loader)


def save_sharded(directory: str) -> None:
    """Saves a step of a model that FSDP2 shards, and notes what FSDP2 gathers."""
    from accelerate_sharded_workloads import make_accelerator

    from resumekit.adapters.accelerate import Checkpointer

    torch.manual_seed(0)
    accelerator = make_accelerator("FSDP2", 1)
    model, optimizer, loader = prepare_whole_or_sharded(accelerator)
    with Checkpointer(accelerator, Path(directory) / "run", save_every=SHARDED_AT) as checkpointer:
        for images, labels in checkpointer.batches(loader, epochs=1):
            if checkpointer.progress.step == SHARDED_AT:
                break
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
    whole = whole_states(model, optimizer.optimizer)
    if accelerator.is_main_process:
        torch.save(whole, Path(directory) / "gathered-0.pt")


def load_whole(directory: str, *, source: str) -> None:
    """A script without resumekit and without FSDP2, which notes what it loads."""
    accelerator = Accelerator(cpu=True)
    model, optimizer, _ = prepare_whole_or_sharded(accelerator)
    accelerator.load_state(str(Path(directory) / source))
    torch.save(whole_states(model, optimizer.optimizer), Path(directory) / f"{source}-0.pt")
