"""Lightning whose model or optimizer is sharded over the ranks, by FSDP2 or by DeepSpeed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from lightning_workloads import NUM_SAMPLES, QUIET, make_loader
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from resumekit.adapters.lightning import ResumeCallback

GATHERED = "gathered.json"


class OnCpu(DeepSpeedStrategy):
    """DeepSpeed on gloo; lightning 2.6 strategies/deepspeed.py takes it for CUDA only."""

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _get_process_group_backend(self) -> str:
        return "gloo"

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)


class Classifier(LightningModule):
    """With dropout and a norm without buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 32), nn.LayerNorm(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10)
        )

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is not None and not isinstance(self.layers[0].weight, DTensor):
            for layer in (self.layers[0], self.layers[4], self.layers):
                fully_shard(layer, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("val_loss", loss + 0.01 * torch.randn(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = AdamW(self.parameters(), lr=1e-2)
        schedule = OneCycleLR(optimizer, max_lr=0.02, total_steps=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make_strategy(sharding: str) -> Any:
    if sharding == "FSDP2":
        return ModelParallelStrategy(int(os.environ["WORLD_SIZE"]), 1)
    if sharding == "tensor parallel":
        return ModelParallelStrategy(1, int(os.environ["WORLD_SIZE"]))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": int(sharding[-1])},
        "zero_allow_untested_optimizer": True,
    }
    return OnCpu(config=config)


def note_weights(trainer: Any, path: Path) -> None:
    """Writes down the fp32 weights that the strategy gathers, by the module's own names."""
    from deepspeed.utils import safe_get_full_fp32_param

    def gathered(parameter: Any) -> Any:
        if isinstance(parameter, DTensor):
            return parameter.full_tensor()
        return safe_get_full_fp32_param(parameter)

    named = list(trainer.lightning_module.named_parameters())
    whole = {name: gathered(each).tolist() for name, each in named}  # collective
    if trainer.is_global_zero:
        path.write_text(json.dumps(whole), encoding="utf-8")


def train(
    directory: str,
    *,
    sharding: str,
    accumulate: int = 1,
    validate: bool = False,
    epochs: int = 2,
    save_every: int = 3,
) -> None:
    """Trains with dropout and AdamW on as many ranks as the environment says."""
    world_size = int(os.environ["WORLD_SIZE"])
    seed_everything(0)
    trainer = Trainer(
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
        limit_val_batches=1.0 if validate else 0,
        enable_checkpointing=False,
        strategy=make_strategy(sharding),
        devices=world_size,
        callbacks=[ResumeCallback(directory, save_every=save_every, strict=True)],
        **QUIET,
    )
    torch.manual_seed(int(os.environ["RANK"]) + 1)  # ranks draw different dropout masks
    trainer.fit(
        Classifier(),
        make_loader(True, "shuffle", "0", NUM_SAMPLES),
        make_loader(False, "in order", "0", 20),
    )
    if sharding == "FSDP2":
        assert all(isinstance(each, DTensor) for each in trainer.model.parameters())
    else:
        assert trainer.model.zero_optimization_stage() == int(sharding[-1])
    note_weights(trainer, Path(directory).with_name(GATHERED))
    torch.distributed.destroy_process_group()
