"""A training function on ``pytorch_lightning``, the other package that Lightning comes in."""

from __future__ import annotations

from typing import Any

import pytorch_lightning
import torch
from digits import Digits
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from resumekit.adapters.lightning import ResumeCallback


class Classifier(pytorch_lightning.LightningModule):
    """A small classifier with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.3), nn.Linear(32, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2)


def train(directory: str, *, save_every: int = 3) -> None:
    """Trains the classifier in one process."""
    pytorch_lightning.seed_everything(0)
    trainer = pytorch_lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            ResumeCallback(f"{directory}/run", save_every=save_every, strict=True),
            EMAWeightAveraging(decay=0.9),
            EarlyStopping("loss", patience=5),
            ModelCheckpoint(f"{directory}/own"),
        ],
    )
    trainer.fit(Classifier(), DataLoader(Digits(92, augment=True), batch_size=8, shuffle=True))
