"""Stock trainings on two ranks that shard, and save shards; and the same under resumekit.

``how`` is what a launch does, as in ``import_workloads``.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.utils.fsdp_utils import (
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from accelerate_sharded_workloads import make_accelerator
from import_workloads import (
    BATCH_SIZE,
    EPOCHS,
    NUM_SAMPLES,
    Numbers,
    Recorded,
    Records,
    arguments_of,
    fit,
    loop,
    loss_of,
    run_trainer,
    small_gpt,
    step_of,
)
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed import destroy_process_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from trainer_sharded_workloads import OnCpu
from transformers import set_seed

PER_EPOCH = NUM_SAMPLES // BATCH_SIZE // 2  # of each of two ranks
EPOCH, BATCH = 1, 2  # where it saves: in the middle of an epoch


class LocalRecords(Records):
    """Notes the weights that a rank has."""

    def note_weights(self, model: nn.Module) -> None:
        """A step was taken."""
        parts = [each.detach() for each in model.parameters()]
        local = [each.to_local() if isinstance(each, DTensor) else each for each in parts]
        self.weights.append(torch.cat([each.flatten() for each in local]))


def network(dropout: float) -> nn.Module:
    """Layers that two ranks do not divide evenly."""
    return nn.Sequential(
        nn.Linear(8, 17), nn.LayerNorm(17), nn.ReLU(), nn.Dropout(dropout), nn.Linear(17, 5)
    )


OF_RANKS = "SHARDED_STATE_DICT, use_dcp=False"


def save_as(kind: str, accelerator: Any) -> None:
    """What ``save_state`` writes."""
    plugin = accelerator.state.fsdp_plugin
    plugin.state_dict_config = plugin.optim_state_dict_config = None  # those of another kind
    plugin.set_state_dict_type(kind.partition(",")[0])


class OfRanks:
    """Saves and loads by files of each rank, which ``save_state`` has no option for."""

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, scheduler: Any) -> None:
        self.common = accelerator.state.fsdp_plugin, accelerator
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def save_state(self, path: str) -> None:
        """Writes the files."""
        save_fsdp_model(*self.common, self.model, path, use_dcp=False)
        save_fsdp_optimizer(*self.common, self.optimizer, self.model, path, use_dcp=False)
        if rank() == 0:
            torch.save(self.scheduler.state_dict(), f"{path}/scheduler.bin")

    def load_state(self, path: str) -> None:
        """Loads them."""
        load_fsdp_model(*self.common, self.model, path, use_dcp=False)
        load_fsdp_optimizer(*self.common, self.optimizer, self.model, path, use_dcp=False)
        self.scheduler.load_state_dict(torch.load(f"{path}/scheduler.bin"))


def rank() -> int:
    """Of this process."""
    return int(os.environ.get("RANK", "0"))


def in_accelerate(directory: str, *, how: str, sharding: str, kind: str, source: str = "") -> None:
    """A loop with dropout; its own resume skips what was used, as Accelerate documents it."""
    set_seed(0)
    records, accelerator = LocalRecords(directory, rank()), make_accelerator(sharding, 1)
    accelerator.dataloader_config.use_seedable_sampler = True
    save_as(kind, accelerator)
    model: Any = network(0.0 if kind == OF_RANKS else 0.3)  # they have no RNG states
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler: Any = CosineAnnealingLR(optimizer, 2 * EPOCHS * PER_EPOCH)
    loader: Any = DataLoader(Numbers(), BATCH_SIZE, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    torch.manual_seed(rank() + 1)  # ranks draw different dropout masks
    saver = accelerator if kind != OF_RANKS else OfRanks(accelerator, model, optimizer, scheduler)

    step = step_of(accelerator, records, model, optimizer, scheduler)
    given: dict[str, Any] = {"how": how, "source": source, "saver": saver}
    loop(accelerator, loader, step, directory, saves_at=(EPOCH, BATCH), **given)
    records.write()
    destroy_process_group()


class _ShardedRecorded(Recorded, OnCpu):
    """Notes its steps."""


def in_trainer(directory: str, *, how: str, kind: str, source: str = "") -> None:
    """GPT-2 with dropout and tied weights, under FSDP2."""
    set_seed(0)
    arguments = arguments_of(directory, how=how, save_steps=EPOCH * PER_EPOCH + BATCH)
    records = LocalRecords(directory, rank())
    trainer = _ShardedRecorded(small_gpt(), arguments, train_dataset=Numbers())
    save_as(kind, trainer.accelerator)
    run_trainer(trainer, records, directory, how=how, source=source, seed=rank() + 1)


class _ShardedModule(LightningModule):
    def __init__(self, records: Records) -> None:
        super().__init__()
        self.layers = network(0.0)
        self._note = records.note_batch

    def configure_model(self) -> None:
        mesh: Any = self.device_mesh
        layers: Any = self.layers
        if not isinstance(layers[0].weight, DTensor):
            for layer in (layers[0], layers[4], layers):
                fully_shard(layer, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = loss_of(self.layers, batch)
        self._note(loss, batch["input_ids"])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)
        scheduler = CosineAnnealingLR(optimizer, EPOCHS * PER_EPOCH)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def in_lightning(directory: str, *, how: str, source: str = "") -> None:
    """Samples in order, without dropout, under ModelParallelStrategy."""
    seed_everything(0, verbose=False)
    records = LocalRecords(directory, rank())
    options: dict[str, Any] = {"devices": 2, "strategy": ModelParallelStrategy(2, 1)}
    fit(_ShardedModule(records), records, directory, how=how, source=source, **options)
    destroy_process_group()
