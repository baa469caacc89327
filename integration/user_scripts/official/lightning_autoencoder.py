"""An autoencoder and a LightningDataModule, after Lightning's official example ``autoencoder``.

Its own resume: ``--ckpt_path`` is passed to ``fit``.
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from small_data import images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class LitAutoEncoder(LightningModule):
    def __init__(self, hidden_dim=32):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(
            nn.Linear(64, hidden_dim), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden_dim, 3)
        )
        self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 64))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        return self._common_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._common_step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def _common_step(self, batch, stage):
        x = batch[0].flatten(1)
        loss = nn.functional.mse_loss(self(x), x)
        self.log(f"{stage}_loss", loss, on_step=True, sync_dist=stage == "val")
        return loss


class MyDataModule(LightningDataModule):
    def __init__(self, batch_size):
        super().__init__()
        dataset = TensorDataset(images(80)[0])
        self.train, self.val = random_split(dataset, [64, 16])
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--default_root_dir", required=True)
    parser.add_argument("--ckpt_path")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()

    seed_everything(1234)
    model = LitAutoEncoder()
    trainer = Trainer(
        default_root_dir=args.default_root_dir,
        accelerator="cpu",
        devices=args.devices,
        max_epochs=3,
        callbacks=[ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)],
        enable_progress_bar=False,
    )
    trainer.fit(model, MyDataModule(8 // args.devices), ckpt_path=args.ckpt_path)


if __name__ == "__main__":
    main()
