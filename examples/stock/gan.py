"""``gan.py`` with Lightning's own resume: ``ModelCheckpoint`` and ``ckpt_path="last"``.

Prove: resumekit prove --at step:80 -- python examples/stock/gan.py --dir {dir}
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

LATENT = 32


def make_generator():
    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 32, 4),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def make_discriminator():
    return nn.Sequential(
        nn.Conv2d(1, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Dropout(0.3),
        nn.Conv2d(32, 1, 4),
        nn.Flatten(),
    )


class GAN(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.automatic_optimization = False
        self.generator = make_generator()
        self.discriminator = make_discriminator()
        self.lr = lr

    def training_step(self, batch):
        (real,) = batch
        g_optimizer, d_optimizer = self.optimizers()
        noise = torch.randn(len(real), LATENT, 1, 1, device=self.device)
        ones = torch.ones(len(real), 1, device=self.device)

        self.toggle_optimizer(d_optimizer)
        with torch.no_grad():
            fake = self.generator(noise)
        d_loss = self.loss(real, ones) + self.loss(fake, 0 * ones)
        d_optimizer.zero_grad()
        self.manual_backward(d_loss)
        d_optimizer.step()
        self.untoggle_optimizer(d_optimizer)

        self.toggle_optimizer(g_optimizer)
        g_loss = self.loss(self.generator(noise), ones)
        g_optimizer.zero_grad()
        self.manual_backward(g_loss)
        g_optimizer.step()
        self.untoggle_optimizer(g_optimizer)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, on_step=False, on_epoch=True)

    def loss(self, images, labels):
        return F.binary_cross_entropy_with_logits(self.discriminator(images), labels)

    def on_train_epoch_end(self):
        metrics = {name: f"{value:.3f}" for name, value in self.trainer.callback_metrics.items()}
        print(f"epoch {self.current_epoch}: {metrics}", flush=True)

    def configure_optimizers(self):
        betas = (0.5, 0.999)
        return (
            torch.optim.Adam(self.generator.parameters(), lr=self.lr, betas=betas),
            torch.optim.Adam(self.discriminator.parameters(), lr=self.lr, betas=betas),
        )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="runs/gan")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    L.seed_everything(0)
    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True)

    saving = ModelCheckpoint(args.dir, every_n_train_steps=20, save_last=True)
    trainer = L.Trainer(
        max_epochs=args.epochs,
        devices=1,
        callbacks=[saving],
        default_root_dir=args.dir,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(GAN(args.lr), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
