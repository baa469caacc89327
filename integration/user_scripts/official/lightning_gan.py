"""A GAN with manual optimization, after Lightning's official example ``basic_gan``.

Its own resume: ``ckpt_path="last"``.
"""

from __future__ import annotations

import argparse

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from small_data import images
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

LATENT_DIM = 16


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(LATENT_DIM, 32),
            nn.BatchNorm1d(32),
            nn.LeakyReLU(0.2),
            nn.Linear(32, 64),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.model(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(32, 1)
        )

    def forward(self, img):
        return self.model(img.flatten(1))


class GAN(LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = Generator()
        self.discriminator = Discriminator()

    def forward(self, z):
        return self.generator(z)

    def training_step(self, batch):
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], LATENT_DIM).type_as(imgs)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        fake = torch.zeros(imgs.size(0), 1).type_as(imgs)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def adversarial_loss(self, y_hat, y):
        return nn.functional.binary_cross_entropy_with_logits(y_hat, y)

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        return [opt_g, opt_d], []


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--default_root_dir", required=True)
    args = parser.parse_args()

    seed_everything(0)
    loader = DataLoader(TensorDataset(*images(64)), batch_size=8, shuffle=True)
    saving = ModelCheckpoint(args.default_root_dir, every_n_train_steps=10, save_last=True)
    trainer = Trainer(
        default_root_dir=args.default_root_dir,
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        callbacks=[saving],
        enable_progress_bar=False,
    )
    trainer.fit(GAN(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
