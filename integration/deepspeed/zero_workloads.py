"""One run, each launch in another ZeRO stage, on another number of ranks, or without ZeRO."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import set_accelerator
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed_workloads import HalfPrecisionCPU, start_ranks
from digits import Digits
from torch import nn
from torch.distributed import destroy_process_group, get_rank, get_world_size
from torch.utils.data import DataLoader, DistributedSampler

from resumekit.adapters.deepspeed import Checkpointer
from resumekit.adapters.torch import Checkpointer as PlainCheckpointer
from resumekit.frameworks.deepspeed import dynamic_scaler

NUM_SAMPLES = 96
GLOBAL_BATCH = 24
NATIVE = "pytorch_model.bin"
MOMENTS = ("exp_avg", "exp_avg_sq")


class Classifier(nn.Module):
    """Layers of sizes that no number of ranks divides."""

    def __init__(self, *, tied: bool, frozen: bool, unused: bool) -> None:
        super().__init__()
        self.expand = nn.Linear(64, 53)
        self.norm = nn.LayerNorm(53)
        self.again = nn.Linear(53, 53, bias=False)
        self.once_more = nn.Linear(53, 53, bias=False)
        self.head = nn.Linear(53, 10)
        if tied:
            self.once_more.weight = self.again.weight
        if frozen:
            self.expand.requires_grad_(requires_grad=False)
        if unused:
            self.unused = nn.Linear(3, 3)
        if frozen:  # a buffer: the engine leaves its type
            self.register_buffer("scale", torch.ones(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.expand(images)))
        return self.head(torch.tanh(self.once_more(torch.tanh(self.again(hidden)))))


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with a weight decay, and the others without."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


class Plain:
    """The calls of an engine, for a model and AdamW without DeepSpeed."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self.optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.module(images)
        return outputs

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_engine(
    model: nn.Module,
    stage: int,
    precision: str,
    *,
    lr_scheduler: Callable[..., Any] | None = None,
    sub_group_size: int = 3000,
    elastic: bool = False,
) -> Any:
    """DeepSpeed's engine; its optimizer steps on fp32 weights, at stage 3 in small groups."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "sub_group_size": sub_group_size},
        "bf16": {"enabled": precision == "bf16"},
    }
    if precision == "fp16":  # low enough that no step is skipped
        set_accelerator(HalfPrecisionCPU())
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    if stage == 3:  # some parameters are kept whole on every rank
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 400
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if elastic:
        config["zero_optimization"]["elastic_checkpoint"] = True
    return deepspeed.initialize(
        model=model,
        model_parameters=param_groups(model),
        lr_scheduler=lr_scheduler,
        config=config,
    )[0]


def take_over(
    directory: str,
    *,
    stage: int | None,
    precision: str = "fp32",
    tied: bool = False,
    frozen: bool = False,
    unused: bool = False,
    exclude: str = "",
    num_steps: int = 3,
    seed: int = 0,
    native: bool = False,
) -> None:
    """Notes the whole state that it found, trains, saves, and notes what it saved.

    Args:
        directory: the run directory.
        stage: of ZeRO; None for plain PyTorch.
        precision: of the module; ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        tied: whether two layers share a weight.
        frozen: whether a layer is not trained.
        unused: whether a layer never gets a gradient.
        exclude: a component that is not taken over.
        num_steps: to train.
        seed: of the weights that the launch begins with; they must not matter.
        native: whether DeepSpeed writes its file of 16-bit weights too.
    """
    start_ranks()
    torch.manual_seed(seed)
    model = Classifier(tied=tied, frozen=frozen, unused=unused)
    engine: Any = Plain(model) if stage is None else make_engine(model, stage, precision)
    extras = {"steps": 0}
    changes: Any = frozenset({"world_size"})
    if stage is None:
        checkpointer: Any = PlainCheckpointer(
            directory,
            model=model,
            optimizer=engine.optimizer,
            extras=extras,
            allow_changes=changes,
        )
    else:
        checkpointer = Checkpointer(
            engine,
            directory,
            extras=extras,
            allow_changes=changes,
            exclude={exclude} if exclude else frozenset(),
        )
    notes: dict[str, Any] = {"launch": f"{stage} on {get_world_size()}"}
    notes["resumed"] = checkpointer.resume().resumed
    notes["found"] = dict(whole_state(engine))
    digits = Digits(NUM_SAMPLES, augment=False)
    images, labels = digits.images, torch.tensor(digits.labels)
    if stage is not None:
        images = images.to(engine.get_data_types()[0])
    for _ in range(num_steps):
        chosen = torch.randperm(
            NUM_SAMPLES, generator=torch.Generator().manual_seed(extras["steps"])
        )
        mine = chosen[:GLOBAL_BATCH][get_rank() :: get_world_size()]
        loss = nn.functional.cross_entropy(engine(images[mine]).float(), labels[mine])
        engine.backward(loss)
        engine.step()
        extras["steps"] += 1
    checkpointer.save()
    if native:
        engine.save_16bit_model(str(Path(directory).parent), NATIVE)
    notes["saved"] = dict(whole_state(engine))
    if get_rank() == 0:
        with (Path(directory).parent / "notes.jsonl").open("a") as file:
            file.write(json.dumps(notes) + "\n")
    checkpointer.close()
    destroy_process_group()


def train_and_lose(directory: str, *, stage: int) -> None:
    """Trains with a save after every step.

    Args:
        directory: the run directory.
        stage: of ZeRO.
    """
    start_ranks()
    torch.manual_seed(0)
    engine = make_engine(Classifier(tied=True, frozen=False, unused=False), stage, "fp32")
    data = Digits(NUM_SAMPLES, augment=False)
    size = GLOBAL_BATCH // get_world_size()
    loader = DataLoader(data, batch_size=size, sampler=DistributedSampler(data, seed=3))
    where = Path(directory) / "run"
    checkpointer = Checkpointer(engine, where, save_every=1, agreement_timeout_seconds=3)
    for images, labels in checkpointer.batches(loader, epochs=2):
        loss = nn.functional.cross_entropy(engine(images), labels)
        engine.backward(loss)
        engine.step()
        checkpointer.step(loss=loss)
    checkpointer.close()
    destroy_process_group()


class DiesInTheMiddle(TorchCheckpointEngine):
    """DeepSpeed's own checkpoint engine on a rank that dies when half of a file is written."""

    def save(self, state_dict: dict[str, Any], path: str) -> None:
        """Writes half of the file."""
        super().save(state_dict, path)
        os.truncate(path, Path(path).stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def save_natively_and_lose(directory: str, *, stage: int) -> None:
    """Saves twice by ``engine.save_checkpoint``; rank 1 dies in the second save."""
    start_ranks()
    torch.manual_seed(0)
    engine = make_engine(Classifier(tied=True, frozen=False, unused=False), stage, "fp32")
    for tag in ("first", "second"):
        loss = engine(torch.rand(GLOBAL_BATCH // get_world_size(), 64)).square().mean()
        engine.backward(loss)
        engine.step()
        engine.save_checkpoint(directory, tag=tag)
        if get_rank() == 1:
            engine.checkpoint_engine = DiesInTheMiddle()
    destroy_process_group()


def whole_state(engine: Any, digest: Callable[..., Any] | None = None) -> Iterator[tuple[str, Any]]:
    """A digest of every fp32 weight, moment and count of steps, as DeepSpeed gathers them."""
    digest = digest_of if digest is None else digest
    is_plain = isinstance(engine.optimizer, torch.optim.Optimizer)
    optimizer = engine.optimizer if is_plain else engine.optimizer.optimizer
    if hasattr(engine.optimizer, "_hp_optimizer_states_linked") and optimizer.state:
        # deepspeed 0.19 runtime/zero/stage_1_and_2.py links the moments of all groups when the
        # first one has stepped, and never again.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            with deepspeed.zero.GatheredParameters([parameter]):
                yield name, digest(parameter)
        elif is_plain:
            yield name, digest(parameter)
            for moment in MOMENTS if parameter in optimizer.state else ():
                yield f"{name}.{moment}", digest(optimizer.state[parameter][moment])
        elif hasattr(engine.optimizer, "fp32_groups"):  # bf16 without ZeRO
            weights = fp32_weights(engine.optimizer)[parameter]
            yield name, digest(weights)
            for moment in MOMENTS:
                yield f"{name}.{moment}", digest(optimizer.state[weights][moment])
        else:
            yield name, digest(safe_get_full_fp32_param(parameter))
            for moment in MOMENTS if optimizer.state else ():
                yield (
                    f"{name}.{moment}",
                    digest(safe_get_full_optimizer_state(parameter, moment)),
                )
    counts = {int(values["step"]) for values in optimizer.state.values()}
    yield "steps", ", ".join(map(str, sorted(counts)))
    if engine.optimizer is not optimizer and dynamic_scaler(engine.optimizer) is not None:
        scaler = dynamic_scaler(engine.optimizer)
        yield "loss_scale", f"{scaler.cur_scale:.0f} since {scaler.last_overflow_iter}"
    for name, buffer in engine.module.named_buffers():
        yield name, digest(buffer)


def fp32_weights(optimizer: Any) -> dict[torch.Tensor, torch.Tensor]:
    """The weights that are stepped on, by the parameter that is rounded from them."""
    groups = zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
    return {p: w for group in groups for p, w in zip(*group, strict=True)}


def digest_of(tensor: torch.Tensor) -> str:
    """The digest of a tensor's bits."""
    content = tensor.detach().float().contiguous().view(torch.int32).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()
