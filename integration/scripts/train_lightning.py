"""Handwritten digits with Lightning: ``stock_lightning.py``, plus the ResumeCallback."""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.lightning import ResumeCallback


class Digits(lightning.LightningModule):
    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.layers = nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, total_steps=self.num_steps
        )
        return [optimizer], [{"scheduler": lr_scheduler, "interval": "step"}]


class Averaging(Callback):
    def __init__(self, module: nn.Module) -> None:
        self.ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        self.ema.update_parameters(pl_module)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", default="runs/digits")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save-every", type=int, default=10)
    arguments = parser.parse_args()

    lightning.seed_everything(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
    labels = torch.tensor(digits.target)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    module = Digits(arguments.epochs * len(loader))
    averaging = Averaging(module)

    saving = ResumeCallback(arguments.directory, ema=averaging.ema, save_every=arguments.save_every)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=arguments.epochs,
        callbacks=[averaging, saving],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)


if __name__ == "__main__":
    main()
