"""Training functions on DeepSpeed that the conformance kit launches, kills and compares.

They are loops of the kind that people write, on scikit-learn's handwritten digits; the options are
the factors of the test matrix. None looks at whether it was started before.
"""

from __future__ import annotations

import os
import random
from typing import Any

import deepspeed
import numpy as np
import torch
from annealed import Annealed
from deepspeed.accelerator import set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from digits import Digits
from torch import nn
from torch.distributed import destroy_process_group, get_rank, get_world_size
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

from resumekit.adapters.deepspeed import Checkpointer
from resumekit.testing.launchers import free_port

NUM_SAMPLES = 92  # the last batch of an epoch is a partial one
BATCH_SIZE = 8
OVERFLOWS = (4, 10)  # the steps at which gradients in fp16 are made to overflow


class LoadsItself(torch.optim.AdamW):
    """An optimizer whose state only it knows how to load."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As its parent does."""
        super().load_state_dict(state_dict)


class TrackedDropout(nn.Dropout):
    """Draws from an RNG state of its own, as the parts of a model-parallel layer do."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with get_cuda_rng_tracker().fork("dropout"):
            return super().forward(inputs)


class HalfPrecisionCPU(CPU_Accelerator):
    """The CPU, which reports to DeepSpeed that it computes in fp16, as torch's kernels do."""

    def is_fp16_supported(self) -> bool:
        """Without asking oneDNN for kernels of its own."""
        return True


def start_ranks() -> None:
    """What the launcher of a job of several ranks does, for a job of one."""
    if "RANK" not in os.environ:
        alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}
        os.environ.update({name: str(value) for name, value in alone.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    deepspeed.init_distributed("gloo")


def make_config(
    *,
    stage: int,
    accumulate: int,
    precision: str,
    scheduler: str,
    offload: bool,
    small_buckets: bool = False,
) -> dict[str, Any]:
    """The configuration, as it stands in people's JSON files."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": precision.startswith("bf16")},
    }
    if precision.startswith("fp16"):  # it begins too high, and doubles every two steps
        config["fp16"] = {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2}
        config["fp16"]["hysteresis"] = 2
    if precision == "fp16, fused":
        del config["optimizer"]["params"]["torch_adam"]
    if stage == 3:  # of five parameters, one is partitioned and four are kept whole on every rank
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 400
    if small_buckets:
        config["zero_optimization"].update(reduce_bucket_size=1000, allgather_bucket_size=1000)
    if offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["zero_force_ds_cpu_optimizer"] = False
    if precision == "bf16, gradients in fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if precision == "autocast":
        config["torch_autocast"] = {"enabled": True, "dtype": "float16"}
    if scheduler == "deepspeed":
        params = {"warmup_max_lr": 1e-2, "warmup_num_steps": 10, "total_num_steps": 60}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": params}
    return config


def one_cycle(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Moves the learning rate and the momentum at every step."""
    return OneCycleLR(optimizer, max_lr=0.02, total_steps=100)


def train(
    directory: str,
    *,
    stage: int = 1,
    accumulate: int = 1,
    loader: str = "shuffle",
    augment: bool = False,
    precision: str = "fp32",
    scheduler: str = "torch",
    offload: bool = False,
    frozen: bool = False,
    small_buckets: bool = False,
    loads_itself: bool = False,
    loop: str = "batches",
    mark: bool = True,
    report: bool = False,
    annealed: bool = False,
    tracked: bool = False,
    width: int = 32,
    epochs: int = 2,
    save_every: int = 3,
    resume_from: str | None = None,
    async_save: bool = False,
) -> None:
    """Trains a small classifier with dropout, AdamW and averaged weights."""
    is_fp16, is_bf16 = precision.startswith("fp16"), precision.startswith("bf16")
    if is_fp16:
        set_accelerator(HalfPrecisionCPU())
    start_ranks()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    normalisation = nn.LayerNorm if is_bf16 or is_fp16 else nn.BatchNorm1d
    dropout = Annealed(width) if annealed else nn.Dropout(0.3)
    if tracked:
        get_cuda_rng_tracker().add("dropout", 7)
        dropout = TrackedDropout(0.3)
    bare = nn.Sequential(
        nn.Linear(64, width), normalisation(width), nn.ReLU(), dropout, nn.Linear(width, 10)
    )
    bare[0].requires_grad_(not frozen)
    data = Digits(NUM_SAMPLES, augment=augment)
    config = make_config(
        stage=stage,
        accumulate=accumulate,
        precision=precision,
        scheduler=scheduler,
        offload=offload,
        small_buckets=small_buckets,
    )
    trained = [each for each in bare.parameters() if each.requires_grad]
    optimizer = None
    if loads_itself:
        del config["optimizer"]
        config["zero_allow_untested_optimizer"] = True
        optimizer = LoadsItself(trained, lr=1e-2)
    engine, _, own_loader, _ = deepspeed.initialize(
        model=bare,
        optimizer=optimizer,
        model_parameters=trained,
        lr_scheduler=one_cycle if scheduler == "torch" else None,
        training_data=data if loader == "own" else None,
        config=config,
    )
    batches: Any = own_loader
    if get_world_size() > 1 and loader == "shuffle":
        batches = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    elif loader == "shuffle":
        batches = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    average = (
        None if stage == 3 else AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    )
    torch.manual_seed(get_rank() + 1)  # ranks draw different dropout masks

    extras = {"images_seen": 0}
    checkpointer = Checkpointer(
        engine,
        directory,
        ema=average,
        extras=extras,
        save_every=save_every,
        best_metric="loss" if report else None,
        strict=loader != "own",
        resume_from=resume_from,
        async_save=async_save,
        keep_latest=None if frozen else 2,
    )

    def one_batch(images: torch.Tensor, labels: torch.Tensor) -> None:
        extras["images_seen"] += len(images)
        outputs = engine(images.to(engine.get_data_types()[0]))
        loss = nn.functional.cross_entropy(outputs.float(), labels)
        if is_fp16 and engine.global_steps in OVERFLOWS:
            loss = loss * 1e30
        engine.backward(loss)
        ends_window = engine.is_gradient_accumulation_boundary()
        engine.step()
        if average is not None and ends_window:
            average.update_parameters(engine.module)
        if mark:
            checkpointer.step(loss=loss, tokens=images.numel())

    if loop == "batches":
        for images, labels in checkpointer.batches(batches, epochs=epochs):
            one_batch(images, labels)
            if report and engine.global_steps % 5 == 0:
                checkpointer.report(loss=random.random())
    else:
        for _ in checkpointer.epochs(epochs):
            np.random.random()
            for images, labels in checkpointer.batches(batches):
                one_batch(images, labels)
    checkpointer.close()
    if is_fp16:
        print(f"skipped {engine.skipped_steps}, scale {loss_scale(engine.optimizer)}")
    destroy_process_group()


def loss_scale(optimizer: Any) -> float:
    """What the loss is multiplied with."""
    holder = getattr(optimizer, "loss_scaler", None) or optimizer.loss_scale_config
    return float(holder.cur_scale)


def save_natively(directory: str) -> None:
    """What DeepSpeed saves by itself."""
    start_ranks()
    _small_engine().save_checkpoint(directory)
    destroy_process_group()


def load_natively(directory: str) -> None:
    """Prints what DeepSpeed by itself says about a directory; what it raises, it raises."""
    start_ranks()
    print(f"loaded {_small_engine().load_checkpoint(directory)}")
    destroy_process_group()


def _small_engine() -> Any:
    config = make_config(stage=2, accumulate=1, precision="fp32", scheduler="none", offload=False)
    model = nn.Linear(64, 10)
    return deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )[0]


def start_from_weights(directory: str, *, stage: int) -> None:
    """Trains, and takes the weights alone over into an engine that has trained otherwise."""
    start_ranks()
    config = make_config(
        stage=stage, accumulate=1, precision="fp32", scheduler="none", offload=False
    )
    engines = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        parameters = list(model.parameters())
        engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]
        for _ in range(3):
            engine.backward(engine(torch.rand(8, 64)).square().mean())
            engine.step()
        engines.append(engine)
    trained, other = engines
    with Checkpointer(trained, directory) as checkpointer:
        checkpointer.save()
    with Checkpointer(other, directory, exclude={"optimizer"}) as checkpointer:
        assert checkpointer.resume().resumed
    images = torch.ones(1, 64)
    assert torch.equal(other(images), trained(images))
    for group in other.optimizer.param_groups:
        group["lr"] = 0.0
    other.backward(other(images).sum())
    other.step()  # writes its own copies of the weights into the module
    assert torch.equal(other(images), trained(images))
    destroy_process_group()
