"""Training functions that change their state between an epoch's start and its first batch.

One loop for every library under which the user writes it, on scikit-learn's handwritten digits. It
never looks at whether it was started before.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from digits import Digits
from sharded_workloads import Classifier, in_a_process_group, laid_out
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler

from resumekit.run.resuming.loading import RestoredState
from resumekit.serialization.sharding import local_part

NUM_SAMPLES, BATCH_SIZE, EPOCHS, SAVE_EVERY = 64, 8, 3, 5


class Parts(NamedTuple):
    """What a launch trains; ``weights`` are what the optimizer's parameters are made from."""

    checkpointer: Any
    model: Any
    optimizer: Any
    backward: Callable[[Any], object]
    step: Callable[[], object]
    scheduler: Any
    ema: Any
    extras: dict[str, Any]


def change_all(parts: Parts) -> None:
    """What scripts do at an epoch's start, on all ranks."""
    for group in parts.optimizer.param_groups:
        group["lr"] *= 0.8
    if parts.scheduler is not None:
        parts.scheduler.step()
    for parameter in parts.model.parameters():
        part = local_part(parameter.detach())
        part.add_(torch.randn_like(part), alpha=0.01)
    if parts.ema is not None:
        parts.ema.module.load_state_dict(parts.model.state_dict())
    parts.extras["sum"] = 0.0


def change_one_rank(parts: Parts) -> None:
    """The second rank scales its own running statistics, and its shard of the weights."""
    if os.environ["RANK"] != "1":
        return
    for name, each in [*parts.model.named_buffers(), *parts.model.named_parameters()]:
        if name.endswith("running_mean") or type(each.data) is not torch.Tensor:
            local_part(each.detach()).mul_(0.5)


def change_nothing(parts: Parts) -> None:
    """An evaluation, which draws."""
    parts.model.eval()
    with torch.no_grad():
        parts.model(torch.randn(BATCH_SIZE, 64))
    parts.model.train()


CHANGES = {"all": change_all, "one rank": change_one_rank, "nothing": change_nothing}


def run_loop(parts: Parts, loader: Any, change: str, *, is_restored: bool) -> None:
    """The loop, which every library has.

    Args:
        parts: what it trains.
        loader: of its batches.
        change: a name in ``CHANGES``.
        is_restored: False for the negative control, which leaves the second change as it is.
    """
    if not is_restored:
        RestoredState.restore = lambda self: ([], [])  # type: ignore[method-assign]
    checkpointer = parts.checkpointer
    for _ in checkpointer.epochs(EPOCHS):
        CHANGES[change](parts)
        for images, labels in checkpointer.batches(loader):
            loss = nn.functional.cross_entropy(parts.model(images), labels)
            parts.backward(loss)
            parts.step()
            if parts.ema is not None:
                parts.ema.update_parameters(parts.model)
            parts.extras["sum"] += len(images)
            checkpointer.step(loss=loss)
    checkpointer.close()


def make_loader(num_ranks: int, rank: int) -> DataLoader[Any]:
    """Each rank's part of the digits."""
    data = Digits(NUM_SAMPLES * num_ranks, augment=False)
    sampler = DistributedSampler(data, num_replicas=num_ranks, rank=rank, shuffle=True, seed=3)
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler)


@in_a_process_group
def train_torch(
    directory: str, *, layout: str, change: str = "all", is_restored: bool = True
) -> None:
    """Plain torch, DDP, FSDP2 and FSDP1."""
    from resumekit.adapters.torch import Checkpointer

    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    bare = Classifier(dropout=0.1, batch_norm=not layout.startswith("fsdp"))
    model, num_replicas, replica = laid_out(bare, layout, num_ranks)
    if layout == "ddp":
        model = nn.parallel.DistributedDataParallel(
            bare, find_unused_parameters=True, broadcast_buffers=False
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = ExponentialLR(optimizer, 0.9)
    ema = AveragedModel(model) if layout == "plain" else None
    extras: dict[str, Any] = {"sum": 0.0}
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        ema=ema,
        extras=extras,
        save_every=SAVE_EVERY,
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    parts = Parts(
        checkpointer, model, optimizer, torch.Tensor.backward, step, scheduler, ema, extras
    )
    loader = make_loader(num_replicas, replica)
    run_loop(parts, loader, change, is_restored=is_restored)


def train_accelerate(directory: str, *, change: str = "all", is_restored: bool = True) -> None:
    """Accelerate, with a prepared scheduler."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    from resumekit.adapters.accelerate import Checkpointer

    set_seed(0)
    accelerator = Accelerator(cpu=True)
    model: Any = Classifier(dropout=0.1, batch_norm=True)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler: Any = ExponentialLR(optimizer, 0.9)
    loader: Any = DataLoader(Digits(NUM_SAMPLES, augment=False), BATCH_SIZE, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    ema = AveragedModel(accelerator.unwrap_model(model))
    extras: dict[str, Any] = {"sum": 0.0}
    checkpointer = Checkpointer(
        accelerator, directory, ema=ema, extras=extras, save_every=SAVE_EVERY
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    parts = Parts(
        checkpointer, model, optimizer, accelerator.backward, step, scheduler, ema, extras
    )
    run_loop(parts, loader, change, is_restored=is_restored)


def train_fabric(directory: str, *, change: str = "all", is_restored: bool = True) -> None:
    """Lightning Fabric with the Checkpointer of plain PyTorch."""
    from lightning.fabric import Fabric

    from resumekit.adapters.torch import Checkpointer

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(0)
    module = Classifier(dropout=0.1, batch_norm=True)
    adamw = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(module, adamw)
    extras: dict[str, Any] = {"sum": 0.0}
    checkpointer = Checkpointer(
        directory, model=module, optimizer=adamw, extras=extras, save_every=SAVE_EVERY
    )

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    parts = Parts(checkpointer, model, adamw, fabric.backward, step, None, None, extras)
    run_loop(parts, make_loader(1, 0), change, is_restored=is_restored)


def train_deepspeed(
    directory: str,
    *,
    stage: int,
    precision: str = "fp32",
    loads_itself: bool = False,
    change: str = "all",
    is_restored: bool = True,
) -> None:
    """DeepSpeed; in bf16 the module's weights are the rounded ones of the optimizer."""
    import deepspeed
    from deepspeed_workloads import LoadsItself, make_config, start_ranks

    from resumekit.adapters.deepspeed import Checkpointer

    start_ranks()
    torch.manual_seed(0)
    model = Classifier(dropout=0.1)
    config = make_config(
        stage=stage, accumulate=1, precision=precision, scheduler="deepspeed", offload=False
    )
    optimizer = None
    if loads_itself:
        del config["optimizer"]
        config["zero_allow_untested_optimizer"] = True
        optimizer = LoadsItself(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=config
    )
    extras: dict[str, Any] = {"sum": 0.0}
    checkpointer = Checkpointer(engine, directory, extras=extras, save_every=SAVE_EVERY)
    num_ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    loader = make_loader(num_ranks, rank)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if not is_restored:
        RestoredState.restore = lambda self: ([], [])  # type: ignore[method-assign]
    for _ in checkpointer.epochs(EPOCHS):
        if change == "all":
            for parameter in engine.module.parameters():
                partition = getattr(parameter, "ds_tensor", parameter).data
                partition.mul_(0.9)
            extras["sum"] = 0.0
        else:
            engine.eval()
            with torch.no_grad():
                engine(torch.randn(BATCH_SIZE, 64, dtype=dtype))
            engine.train()
        for images, labels in checkpointer.batches(loader):
            loss = nn.functional.cross_entropy(engine(images.to(dtype)), labels)
            engine.backward(loss)
            engine.step()
            extras["sum"] += len(images)
            checkpointer.step(loss=loss)
    checkpointer.close()
    torch.distributed.destroy_process_group()
