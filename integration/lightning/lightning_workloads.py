"""Training functions on Lightning that the conformance kit launches, kills and compares.

They are programs of the kind that people write, on scikit-learn's handwritten digits; the options
are the factors of the test matrix. None looks at whether it was started before.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from digits import Digits
from frozen_backbone import frozen_backbone
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

import resumekit
from resumekit.adapters.lightning import ResumeCallback

NUM_SAMPLES = 92  # the last batch of an epoch is a partial one
BATCH_SIZE = 8
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Classifier(LightningModule):
    """A small classifier with dropout and batch norm."""

    def __init__(self, scheduler: str = "none", *, frozen: bool = False) -> None:
        super().__init__()
        self.scheduler = scheduler
        self.backbone = frozen_backbone() if frozen else nn.Identity()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
        )
        self.accuracy = MulticlassAccuracy(10)
        self.hardest_loss = 0.0

    def on_train_epoch_start(self) -> None:
        np.random.random()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = self.backbone(batch[0]), batch[1]
        outputs = self.layers(images).float()
        loss = nn.functional.cross_entropy(outputs, labels)
        self.hardest_loss = max(self.hardest_loss, loss.item())
        self.accuracy(outputs, labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        images, labels = batch
        noise = 0.01 * torch.randn(())  # validation draws from the run's random numbers too
        loss = nn.functional.cross_entropy(self.layers(images).float(), labels) + noise
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]
        optimizer = AdamW(trained, lr=1e-2)
        if self.scheduler == "step":
            schedule = OneCycleLR(optimizer, max_lr=0.02, total_steps=100)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]
        if self.scheduler == "plateau":
            plateau = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return [optimizer], [{"scheduler": plateau, "monitor": "val_loss"}]
        return optimizer

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["hardest_loss"] = self.hardest_loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.hardest_loss = checkpoint["hardest_loss"]


class TwoOptimizers(Classifier):
    """The same with two optimizers that it steps by itself."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        first, last = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        first.zero_grad()
        last.zero_grad()
        self.manual_backward(loss)
        first.step()
        last.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [AdamW(self.layers[0].parameters()), AdamW(self.layers[4].parameters(), lr=1e-2)]


class Averaging(Callback):
    """Averages the weights after each step into a model that the user made."""

    def __init__(self, average: AveragedModel) -> None:
        self.average = average

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self.average.update_parameters(pl_module.layers)


class Counting(Callback):
    """A user's callback with a state of its own, in each of the ways that there are."""

    def __init__(self, extras: dict[str, int]) -> None:
        self.num_images = 0
        self.num_labels = torch.tensor(0)  # in what the hooks save only
        self.extras = extras

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.num_images += len(batch[0])
        self.num_labels += len(batch[1])
        self.extras["num_batches"] += 1

    def state_dict(self) -> dict[str, int]:
        return {"num_images": self.num_images}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.num_images = state_dict["num_images"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_labels"] = self.num_labels.clone()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.num_labels = checkpoint["num_labels"]


class Stepping(Callback):
    """A user's callback that says nothing of its state."""

    def __init__(self) -> None:
        self.num_steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_steps += 1


class Asking(Callback):
    """Asks for a save in the middle of each accumulation window of four batches."""

    def __init__(self, saving: ResumeCallback) -> None:
        self.saving = saving

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 4 == 1:
            self.saving.save()


class Judged(Callback):
    """Lets the judge look on where nothing of resumekit runs."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        optimizer = trainer.optimizers[0]
        resumekit.trace(
            trainer.global_step, loss=outputs["loss"], model=pl_module, optimizer=optimizer
        )


def make_loader(augment: bool, kind: str, workers: str, num_samples: int) -> DataLoader[Any]:
    """A training loader, or one for validation, with the sampler and the workers of the cell."""
    return DataLoader(
        Digits(num_samples, augment=augment),
        batch_size=BATCH_SIZE,
        shuffle=kind != "in order",
        generator=torch.Generator().manual_seed(11) if kind == "generator" else None,
        num_workers=0 if workers == "0" else 2,
        persistent_workers=workers == "persistent",
    )


def train_stock(directory: str, *, epochs: int = 2, save_every: int = 3) -> None:
    """The same training with Lightning's own resume."""
    seed_everything(0)
    saving = ModelCheckpoint(directory, every_n_train_steps=save_every, save_last=True)
    trainer = Trainer(max_epochs=epochs, callbacks=[Judged(), saving], **QUIET)
    loader = make_loader(False, "shuffle", "0", NUM_SAMPLES)
    trainer.fit(Classifier(), loader, ckpt_path="last")


def train(
    directory: str,
    *,
    loader: str = "shuffle",
    workers: str = "0",
    augment: bool = False,
    accumulate: int = 1,
    mid_accumulation: Any = "boundary",
    asks: bool = False,
    ema: str = "none",
    scheduler: str = "none",
    validate: bool = False,
    val_check_interval: float = 1.0,
    stop_after: int = 100,
    manual: bool = False,
    precision: str = "32-true",
    epochs: int = 2,
    max_steps: int = -1,
    save_every: int | None = 3,
    async_save: bool = False,
    frozen: bool = False,
) -> None:
    """Trains the classifier, on as many ranks as the environment says."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    seed_everything(0)
    module = TwoOptimizers() if manual else Classifier(scheduler, frozen=frozen)
    average = AveragedModel(module.layers, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    extras = {"num_batches": 0}
    saving = ResumeCallback(
        directory,
        save_every=save_every,
        mid_accumulation=mid_accumulation,
        ema=average if ema == "given" else None,
        extras=extras,
        best_metric="val_loss" if validate else None,
        async_save=async_save,
        keep_latest=None if frozen else 2,
        # What persistent workers of the validation draw would be lost; these draw nothing.
        strict=not (validate and workers == "persistent"),
    )
    callbacks: list[Any] = [saving, Counting(extras), Stepping()]
    if asks:
        callbacks.append(Asking(saving))
    if ema == "given":
        callbacks.append(Averaging(average))
    if ema == "callback":
        callbacks.append(EMAWeightAveraging(decay=0.9))
    if validate:
        callbacks.append(EarlyStopping("val_loss", patience=stop_after, min_delta=0.5))
    precisions: dict[str, Any] = {"precision": precision}
    if precision == "scaled":
        # lightning 2.6 makes a gradient scaler for fp16, which the CPU does not have.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=4)
        precisions = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}
    trainer = Trainer(
        max_epochs=epochs,
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        val_check_interval=val_check_interval,
        limit_val_batches=1.0 if validate else 0,
        enable_checkpointing=False,
        strategy="ddp" if world_size > 1 else "auto",
        devices=world_size,
        callbacks=callbacks,
        **QUIET,
        **precisions,
    )
    torch.manual_seed(int(os.environ.get("RANK", "0")) + 1)  # ranks draw different dropout masks
    trainer.fit(
        module,
        make_loader(augment, loader, workers, NUM_SAMPLES),
        make_loader(False, "in order", workers, 20),
    )
    if torch.distributed.is_initialized():
        # Lightning does it for NCCL alone, and gloo's threads must not outlive the interpreter.
        torch.distributed.destroy_process_group()
