"""Stock trainings on two ranks that shard, and save shards; and the same under resumekit.

``how`` is what a launch does, as in ``import_workloads``.
"""

from __future__ import annotations

import os
from pathlib import Path
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
    Records,
    _AfterBatch,
    _AfterStep,
    _Recorded,
    loss_of,
)
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed import destroy_process_group
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader
from trainer_sharded_workloads import OnCpu
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from resumekit.adapters.accelerate import Checkpointer
from resumekit.adapters.lightning import ResumeCallback as LightningCallback
from resumekit.adapters.transformers import ResumeCallback

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

    def step(batch: Any) -> torch.Tensor:
        loss: torch.Tensor = loss_of(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        records.note_batch(loss, batch["input_ids"])
        records.note_weights(model)
        return loss

    if how == "resumekit":
        checkpointer = Checkpointer(accelerator, source, save_every=None)
        for batch in checkpointer.batches(loader, epochs=EPOCHS):
            checkpointer.step(loss=step(batch))
        checkpointer.close()
    else:
        first = 0
        if how == "own":
            saver.load_state(source)
            first = EPOCH
        for epoch in range(first, EPOCHS):
            skips = how == "own" and epoch == first
            batches = accelerator.skip_first_batches(loader, BATCH) if skips else loader
            batches.set_epoch(epoch)
            for number, batch in enumerate(batches, BATCH if skips else 0):
                step(batch)
                if (how, epoch, number + 1) == ("stock", EPOCH, BATCH):
                    saver.save_state(str(Path(directory) / "state"))
    records.write()
    destroy_process_group()


class _ShardedRecorded(_Recorded, OnCpu):
    """Notes its steps."""


def in_trainer(directory: str, *, how: str, kind: str, source: str = "") -> None:
    """GPT-2 with dropout and tied weights, under FSDP2."""
    set_seed(0)
    sizes = {"n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=0, **sizes))
    arguments = TrainingArguments(
        output_dir=str(Path(directory) / "output"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH_SIZE,
        learning_rate=1e-2,
        warmup_steps=3,
        logging_steps=4,
        save_strategy="steps" if how == "stock" else "no",
        save_steps=EPOCH * PER_EPOCH + BATCH,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        log_level="error",
    )
    records = LocalRecords(directory, rank())
    trainer = _ShardedRecorded(model, arguments, train_dataset=Numbers())
    save_as(kind, trainer.accelerator)
    trainer.records = records
    trainer.add_callback(_AfterStep(records))
    if how == "resumekit":
        run = Path(directory) / "run"
        trainer.add_callback(ResumeCallback(trainer, run, import_from=source, save_every=None))
    torch.manual_seed(rank() + 1)
    trainer.train(resume_from_checkpoint=source if how == "own" else None)
    records.write()


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
    callbacks: list[Any] = [_AfterBatch(records)]
    if how == "stock":
        files = {"dirpath": directory, "filename": "{step}", "save_top_k": -1}
        callbacks.append(ModelCheckpoint(**files, every_n_train_steps=1))
    if how == "resumekit":
        run = Path(directory) / "run"
        callbacks.append(LightningCallback(run, import_from=source, save_every=None))
    trainer = LightningTrainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(2, 1),
        max_epochs=EPOCHS,
        callbacks=callbacks,
        enable_checkpointing=how == "stock",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    ckpt_path = source if how == "own" else None
    trainer.fit(_ShardedModule(records), DataLoader(Numbers(), BATCH_SIZE), ckpt_path=ckpt_path)
    records.write()
    destroy_process_group()
