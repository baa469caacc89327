"""Stock trainings of two models with two optimizers, and the same under resumekit.

``how`` is what a launch does, as in ``import_workloads``.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from import_workloads import BATCH_SIZE, Numbers, Records, fit, loop
from lightning.pytorch import LightningModule, seed_everything
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader
from transformers import set_seed


class _Pair(nn.Module):
    """Two networks of one class and one shape: only their order distinguishes them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout))
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout))

    def optimizers(self) -> list[Any]:
        """Of one class, with a learning rate of each."""
        pairs = ((self.first, 1e-2), (self.second, 3e-3))
        return [torch.optim.AdamW(each.parameters(), lr=rate) for each, rate in pairs]


def _losses(first: Any, second: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    inputs = batch["input_ids"].float() / 64
    made = first(inputs)
    return [made.square().mean(), (second(inputs) - made.detach()).square().mean()]


def in_accelerate(directory: str, *, how: str, source: str = "", swapped: bool = False) -> None:
    """Two prepared models; its own resume skips what was used."""
    set_seed(0)
    records, config = Records(directory), DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    pair = _Pair(0.3)
    optimizers = pair.optimizers()
    loader: Any = DataLoader(Numbers(), BATCH_SIZE, shuffle=True)
    order = (1, 0) if swapped else (0, 1)
    models = [[pair.first, pair.second][each] for each in order]
    accelerator.prepare(*models, *(optimizers[each] for each in order))
    loader = accelerator.prepare(loader)

    def step(batch: Any) -> torch.Tensor:
        losses = _losses(pair.first, pair.second, batch)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        records.note_batch(losses[1], batch["input_ids"])
        records.note_weights(pair)
        return losses[1]

    loop(accelerator, loader, step, directory, how=how, source=source)
    records.write()


class _PairModule(LightningModule):
    def __init__(self, records: Records) -> None:
        super().__init__()
        self.pair = _Pair(0.0)
        self.automatic_optimization = False
        self._note = records.note_batch

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        schedulers: Any = self.lr_schedulers()
        losses = _losses(self.pair.first, self.pair.second, batch)
        for loss, optimizer, scheduler in zip(losses, optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            scheduler.step()
        self._note(losses[1], batch["input_ids"])

    def configure_optimizers(self) -> Any:
        optimizers = self.pair.optimizers()
        gammas = (0.9, 0.7)
        return optimizers, [StepLR(*pair) for pair in zip(optimizers, (2, 3), gammas, strict=True)]


def in_lightning(directory: str, *, how: str, source: str = "") -> None:
    """Manual optimization with two optimizers and two schedulers."""
    seed_everything(0, verbose=False)
    records = Records(directory)
    fit(_PairModule(records), records, directory, how=how, source=source, every=2)
