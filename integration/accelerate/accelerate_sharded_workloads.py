"""Training functions on Accelerate whose model or optimizer is sharded over the ranks.

One loop for FSDP2 and for the DeepSpeed plugin; it never looks at whether it was started before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.state import DistributedType, PartialState
from accelerate.utils import set_seed
from digits import Digits
from frozen_backbone import frozen_backbone
from torch import nn
from torch.distributed import destroy_process_group
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from resumekit.adapters.accelerate import Checkpointer

NUM_SAMPLES = 92  # the last batch of an epoch is a partial one
BATCH_SIZE = 8


def make_accelerator(sharding: str, accumulate: int) -> Accelerator:
    """An Accelerator that shards, on CPUs; accelerate 1.15 does for accelerators only."""
    if not sharding.startswith("ZeRO-"):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        is_first = sharding == "FSDP1"
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=1 if is_first else 2,
            reshard_after_forward="FULL_SHARD" if is_first else True,
            use_orig_params=True if is_first else None,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Linear"],
        )
        return of_type(DistributedType.FSDP, accelerator)
    plugin = DeepSpeedPlugin(zero_stage=int(sharding[-1]), gradient_accumulation_steps=accumulate)
    accelerator = Accelerator(
        cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=accumulate
    )
    deepspeed.init_distributed("gloo")
    plugin.set_mixed_precision("no")
    plugin.select(_from_accelerator_state=True)
    accelerator.state.deepspeed_plugins = plugin
    return of_type(DistributedType.DEEPSPEED, accelerator)


def of_type(kind: DistributedType, accelerator: Accelerator) -> Accelerator:
    """The Accelerator as if it had found what it looks for."""
    # accelerate 1.15 state.py AcceleratorState.__init__ decides, and each later one looks here.
    PartialState._shared_state["distributed_type"] = kind
    accelerator.state.device = torch.device("cpu")  # FSDP1 takes no cpu:0 for the cpu
    accelerator.state.distributed_type = kind
    return accelerator


class Average:
    """Averaged weights, sharded where the weights are; torch's AveragedModel copies modules."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.weights[name].lerp_(parameter.detach(), 1 - self.decay)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.weights

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.weights = dict(state)


def train(
    directory: str,
    *,
    sharding: str = "FSDP2",
    accumulate: int = 1,
    augment: bool = False,
    average: bool = False,
    mark: bool = True,
    states: bool = False,
    mid_accumulation: Any = "boundary",
    width: int = 33,
    frozen: bool = False,
    async_save: bool = False,
    epochs: int = 2,
    save_every: int = 3,
) -> None:
    """Trains a small classifier with dropout and AdamW; ``states`` saves by ``save_state`` too."""
    set_seed(0)
    accelerator = make_accelerator(sharding, accumulate)
    model: Any = nn.Sequential(
        nn.Linear(64, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 10)
    )
    if frozen:
        model.insert(0, frozen_backbone())
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer: Any = AdamW(trained, lr=1e-2, foreach=False)
    scheduler: Any = OneCycleLR(optimizer, max_lr=0.02, total_steps=100)
    loader: Any = DataLoader(
        Digits(NUM_SAMPLES, augment=augment), batch_size=BATCH_SIZE, shuffle=True
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if sharding == "FSDP1":
        assert isinstance(model[-1], FullyShardedDataParallel)
    elif sharding == "FSDP2":
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    else:
        assert model.zero_optimization_stage() == int(sharding[-1])
    averaged = Average(model, decay=0.9) if average else None
    torch.manual_seed(accelerator.process_index + 1)  # ranks draw different dropout masks
    extras = {"images_seen": 0}
    checkpointer = Checkpointer(
        accelerator,
        directory,
        ema=averaged,
        extras=extras,
        save_every=save_every,
        mid_accumulation=mid_accumulation,
        allow_changes={"world_size"},
        strict=True,
        async_save=async_save,
        transient={"folder"},  # another path in each run whose checkpoints are compared
        keep_latest=None if frozen else 2,
    )
    folder = Path(directory, "state")
    if states and folder.is_dir():
        accelerator.load_state(str(folder))
    for images, labels in checkpointer.batches(loader, epochs=epochs):
        extras["images_seen"] += len(images)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(images).float(), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if averaged is not None and accelerator.sync_gradients:
            averaged.update(model)
        if mark:
            checkpointer.step(loss=loss, tokens=images.numel())
        if states and checkpointer.progress.step % 3 == 0:
            accelerator.save_state(str(folder))
    checkpointer.close()
    destroy_process_group()


def two_engines(directory: str) -> None:
    """Two models that one Accelerator makes engines of."""
    accelerator = make_accelerator("ZeRO-1", 1)
    for _ in range(2):
        model = nn.Linear(4, 4)
        loader = DataLoader(Digits(NUM_SAMPLES, augment=False), batch_size=BATCH_SIZE)
        accelerator.prepare(model, AdamW(model.parameters()), loader)
    Checkpointer(accelerator, directory)
