"""A classifier with Lightning, after the official example ``image_classifier``.

It knows nothing of resumekit. Its own resume is Lightning's: ``ckpt_path="last"``. ``--package``
selects one of the two packages in which Lightning comes.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from unreliable import Samples

parser = argparse.ArgumentParser()
parser.add_argument("--output_dir", type=Path, required=True)
parser.add_argument("--package", default="lightning.pytorch")
parser.add_argument("--ckpt_path", default="last")
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--only_validate", action="store_true")
options = parser.parse_args()
pl: Any = importlib.import_module(options.package)


class Classifier(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.layers(inputs), targets)
        if self.trainer.is_global_zero:
            with (options.output_dir / "losses.jsonl").open("a") as file:
                file.write(json.dumps([self.global_step, loss.item()]) + "\n")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    options.output_dir.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(0)
    inputs = torch.randn(80, 16)
    rows = [(row, int(row.sum() > 0)) for row in inputs]
    loader = DataLoader(Samples(rows), batch_size=8 // options.devices, shuffle=True)
    saving = pl.callbacks.ModelCheckpoint(
        options.output_dir / "own", every_n_train_steps=5, save_last=True
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=options.devices,
        max_epochs=2,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    module = Classifier()
    if options.only_validate:
        trainer.validate(module, loader)
        return
    trainer.fit(module, loader, ckpt_path=options.ckpt_path)
    if trainer.is_global_zero:
        torch.save(module.state_dict(), options.output_dir / "weights.pt")


if __name__ == "__main__":
    main()
