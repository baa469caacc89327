"""Handwritten digits with Lightning, as people write it; ``train_lightning.py`` is its twin.

The resume is Lightning's own: ``ModelCheckpoint(save_last=True)`` and ``fit(ckpt_path="last")``.
The averaged weights are kept in a callback with a state of its own, which Lightning saves and
restores. ``Judged`` with its line of ``resumekit.trace`` lets the judge look on, and does nothing
without it.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import resumekit


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

    def state_dict(self) -> dict[str, Any]:
        return self.ema.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.ema.load_state_dict(state_dict)


class Judged(Callback):
    def __init__(self, ema: AveragedModel) -> None:
        self.ema = ema

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        resumekit.trace(
            trainer.global_step,
            samples=batch[0],
            loss=outputs["loss"],
            model=pl_module,
            optimizer=trainer.optimizers[0],
            ema=self.ema,
        )


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

    saving = ModelCheckpoint(
        arguments.directory, every_n_train_steps=arguments.save_every, save_last=True
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=arguments.epochs,
        callbacks=[averaging, Judged(averaging.ema), saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, ckpt_path="last")


if __name__ == "__main__":
    main()
