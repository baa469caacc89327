"""Training functions for exports: one saves a step in both ways, the other is a stock script."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from digits import Digits
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

NUM_SAMPLES, BATCH_SIZE = 92, 8
SAVED_AT, NUM_MORE = 15, 4
NATIVE = "native/native.ckpt"


class Classifier(LightningModule):
    """Frozen and tied weights, dropout, and a value that its own hooks save."""

    def __init__(self, *, two: bool) -> None:
        super().__init__()
        self.two = two
        self.automatic_optimization = not two
        self.frozen = nn.Linear(64, 32)
        self.frozen.requires_grad_(False)
        self.hidden = nn.Linear(32, 32, bias=False)
        self.tied = nn.Linear(32, 32, bias=False)
        self.tied.weight = self.hidden.weight
        self.last = nn.Linear(32, 10)
        self.hardest_loss = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.tied(self.hidden(self.frozen(batch[0])).relu())
        outputs = self.last(nn.functional.dropout(hidden, 0.3))
        loss = nn.functional.cross_entropy(outputs.float(), batch[1])
        self.hardest_loss = max(self.hardest_loss, loss.item())
        if self.two:
            self.step_both(loss)
        return loss

    def step_both(self, loss: torch.Tensor) -> None:
        for each in self.optimizers():
            each.zero_grad()
        self.manual_backward(loss)
        for each in (*self.optimizers(), *self.lr_schedulers()):
            each.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.frozen(batch[0]).mean())

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        optimizers: list[Any] = [AdamW(trained[1:] if self.two else trained, lr=1e-2)]
        if self.two:
            optimizers.insert(0, SGD(trained[:1], lr=1e-2, momentum=0.9))
        schedules = [OneCycleLR(each, max_lr=0.02, total_steps=200) for each in optimizers]
        return optimizers, [{"scheduler": each, "interval": "step"} for each in schedules]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hardest_loss"] = self.hardest_loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hardest_loss = checkpoint["hardest_loss"]


class Counting(Callback):
    """A user's callback with a state of its own, which notes and stops."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.num_images = 0
        self.notes: dict[str, Any] = {"losses": []}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.notes["loaded"] = copy.deepcopy(self.states(trainer))

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.num_images += len(batch[0])
        self.notes["losses"].append([outputs["loss"].detach().clone(), batch_idx])
        if len(self.notes["losses"]) == self.at:
            self.notes["trained"] = copy.deepcopy(self.states(trainer))
            trainer.should_stop = True

    def states(self, trainer: Any) -> dict[str, Any]:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        module = trainer.lightning_module
        saving = trainer.checkpoint_callback.state_dict()
        return {
            "model": module.state_dict(),
            "optimizers": [each.state_dict() for each in trainer.optimizers],
            "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
            "scaler": None if scaler is None else scaler.state_dict(),
            "others": [module.hardest_loss, self.num_images, trainer.global_step],
            "stopping": [each.state_dict() for each in trainer.early_stopping_callbacks],
            "saving": {name: str(value) for name, value in saving.items()},
            "epoch": trainer.current_epoch,
        }

    def state_dict(self) -> dict[str, int]:
        return {"num_images": self.num_images}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_images = state["num_images"]


def fit(
    directory: str, counting: Counting, *callbacks: Callback, two: bool, scaler: bool, **named: Any
) -> None:
    plugins: Any = None
    if scaler:
        plugins = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy="ddp_find_unused_parameters_true" if world_size > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=5,
        plugins=plugins,
        callbacks=[
            counting,
            EarlyStopping("val_loss", patience=100),
            # Two optimizers that the module steps count as two steps.
            ModelCheckpoint(
                Path(directory) / "native",
                "native",
                every_n_train_steps=SAVED_AT * (1 + two),
                save_top_k=-1,
            ),
            *callbacks,
        ],
    )
    loader = DataLoader(Digits(NUM_SAMPLES, augment=False), batch_size=BATCH_SIZE, shuffle=True)
    validation = DataLoader(Digits(16, augment=False), batch_size=BATCH_SIZE)
    trainer.fit(Classifier(two=two), loader, validation, **named)


def save_both(directory: str, **options: Any) -> None:
    """Saves a step by ``ModelCheckpoint`` and as a checkpoint of resumekit."""
    from resumekit.adapters.lightning import ResumeCallback

    seed_everything(0)
    saving = ResumeCallback(Path(directory) / "run", save_every=SAVED_AT, keep_latest=None)
    fit(directory, Counting(SAVED_AT + 1), saving, **options)


def continue_from(directory: str, *, source: str, **options: Any) -> None:
    """A script without resumekit, which begins from a checkpoint of Lightning."""
    seed_everything(1)
    counting = Counting(NUM_MORE)
    fit(directory, counting, ckpt_path=str(Path(directory) / source), **options)
    rank = os.environ.get("RANK", "0")
    torch.save(counting.notes, Path(directory) / f"{Path(source).name}-{rank}.pt")


def load_module(directory: str, *, source: str, two: bool, scaler: bool) -> None:
    """Opens the module alone."""
    module = Classifier.load_from_checkpoint(Path(directory) / source, two=two)
    torch.save(module.state_dict(), Path(directory) / f"{Path(source).name}-0.pt")
