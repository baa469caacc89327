"""Averaged weights and a schedule, after the examples in Lightning's guides to both.

``EMAWeightAveraging`` validates with the averaged weights and saves them. Its own resume:
``ckpt_path="last"``.
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from small_data import NUM_CLASSES, images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitClassifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(8 * 64, NUM_CLASSES),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self.model(x), y), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--default_root_dir", required=True)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()

    seed_everything(7)
    x, y = images(80)
    batch_size = 8 // args.devices
    train_loader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=batch_size, shuffle=True)
    val_loader = DataLoader(TensorDataset(x[64:], y[64:]), batch_size=batch_size)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        max_epochs=3,
        gradient_clip_val=1.0,
        logger=CSVLogger(args.default_root_dir),
        callbacks=[
            EMAWeightAveraging(decay=0.9),
            LearningRateMonitor(),
            ModelCheckpoint(args.default_root_dir, every_n_train_steps=5, save_last=True),
        ],
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer.fit(LitClassifier(), train_loader, val_loader, ckpt_path="last")


if __name__ == "__main__":
    main()
