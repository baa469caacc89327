"""A stock training with Lightning, which the test of the page "Migrate" changes as it says."""

import lightning as L  # noqa: N812 - as in its own pages
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
        self.criterion = nn.MSELoss()

    def training_step(self, batch: tuple[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(self.layers(batch[0]), batch[0])
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


L.seed_everything(0)
data = TensorDataset(torch.randn(800, 8, generator=torch.Generator().manual_seed(0)))
loader = DataLoader(data, batch_size=4)
module = Autoencoder()
checkpointing = ModelCheckpoint("checkpoints", every_n_train_steps=500, save_last=True)
trainer = L.Trainer(max_epochs=10, callbacks=[checkpointing])
trainer.fit(module, loader, ckpt_path="last")
