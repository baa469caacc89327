"""Training functions whose model is sharded over the ranks, in every layout that torch offers.

One loop for all of them, on scikit-learn's handwritten digits; sizes that no number of ranks
divides. It never looks at whether it was started before.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from digits import Digits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler

from resumekit.adapters.torch import Checkpointer

NUM_SAMPLES = 96
GLOBAL_BATCH = 24


class Classifier(nn.Module):
    """Layers of awkward sizes, a norm, a parameter that never gets a gradient."""

    def __init__(
        self, *, tied: bool = False, dropout: float = 0.0, batch_norm: bool = False
    ) -> None:
        super().__init__()
        self.expand = nn.Linear(64, 52)
        self.squeeze = nn.Linear(52, 34)
        self.norm = nn.BatchNorm1d(34) if batch_norm else nn.LayerNorm(34)
        self.again = nn.Linear(34, 34, bias=False)
        self.unused = nn.Linear(34, 3)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(34, 10)
        if tied:
            self.again.weight = nn.Parameter(torch.randn(34, 34) * 0.1)
            self.once_more = nn.Linear(34, 34, bias=False)
            self.once_more.weight = self.again.weight

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.expand(images))
        hidden = torch.tanh(self.norm(self.squeeze(hidden)))
        hidden = self.dropout(self.again(hidden))
        if hasattr(self, "once_more"):
            hidden = self.once_more(hidden)
        return self.head(hidden)


class Holder(nn.Module):
    """A user's class with a model in some layout as its attribute."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> Any:
        return self.model(images)


def laid_out(model: Classifier, layout: str, num_ranks: int) -> tuple[nn.Module, int, int]:
    """The model in a layout; the number of data-parallel ranks, and this one's index among them."""
    rank = int(os.environ.get("RANK", "0"))
    if layout.startswith("wrapped "):
        inner, num_replicas, replica = laid_out(model, layout.removeprefix("wrapped "), num_ranks)
        return Holder(inner), num_replicas, replica
    if layout == "plain":
        return model, 1, 0
    if layout == "ddp":
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        return ddp, num_ranks, rank
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (num_ranks,))
        return sharded(model, mesh), num_ranks, rank
    if layout == "offloaded":
        mesh = init_device_mesh("cpu", (num_ranks,))
        # Pinned memory asks for an accelerator.
        return sharded(model, mesh, CPUOffloadPolicy(pin_memory=False)), num_ranks, rank
    if layout == "fsdp1":
        return flattened(model), num_ranks, rank
    if layout == "fsdp1 in bf16":
        strategy, half = ShardingStrategy.SHARD_GRAD_OP, MixedPrecision(param_dtype=torch.bfloat16)
        return (
            flattened(model, sharding_strategy=strategy, mixed_precision=half),
            num_ranks,
            rank,
        )
    if layout == "hsdp1":
        mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("copy", "shard"))
        strategy = ShardingStrategy.HYBRID_SHARD
        return flattened(model, device_mesh=mesh, sharding_strategy=strategy), num_ranks, rank
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("copy", "shard"))
        return sharded(model, mesh), num_ranks, rank
    if layout == "tp":
        mesh = init_device_mesh("cpu", (num_ranks,))
        return parallel(model, mesh), 1, 0
    mesh = init_device_mesh("cpu", (num_ranks // 2, 2), mesh_dim_names=("shard", "tensor"))
    whole = sharded(parallel(model, mesh["tensor"]), mesh["shard"])
    return whole, num_ranks // 2, mesh["shard"].get_local_rank()


def flattened(model: Any, **options: Any) -> nn.Module:
    """The model under FSDP1: one layer by itself, and the rest."""
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank has nothing to share with
        model.expand = FullyShardedDataParallel(model.expand, **options)
        return FullyShardedDataParallel(model, **options)


def sharded(model: Any, mesh: DeviceMesh, offload: OffloadPolicy | None = None) -> nn.Module:
    """The model under fully_shard, layer by layer."""
    policy = OffloadPolicy() if offload is None else offload
    for layer in (model.expand, model.squeeze):
        fully_shard(layer, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    whole: nn.Module = model
    return whole


def parallel(model: Classifier, mesh: DeviceMesh) -> nn.Module:
    """The model with its two large layers split by columns and by rows."""
    plan = {"expand": ColwiseParallel(), "squeeze": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


class ByRows(torch.optim.Optimizer):
    """Keeps a mean of squares for each row: moments of another shape than their parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group["lr"])

    def _update(self, parameter: Any, grad: Any, rate: float) -> None:
        state, num_beyond = self.state[parameter], grad.dim() - 1
        square = grad.square().mean(-1) if num_beyond else grad.square()
        state["rows"] = square if "rows" not in state else 0.9 * state["rows"] + 0.1 * square
        scale = state["rows"].sqrt() + 0.1
        parameter.sub_(rate * grad / (scale.unsqueeze(-1) if num_beyond else scale))


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the cell asks for."""
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    if kind == "fused":
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)
    if kind == "by rows":
        return ByRows(model.parameters(), {"lr": 0.05})
    frozen = [p for n, p in model.named_parameters() if n.endswith("unused.weight")]
    for parameter in frozen:
        parameter.requires_grad_(False)
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if n.endswith("weight") and p.requires_grad]
    return torch.optim.Adam(
        [{"params": rest, "weight_decay": 0.1}, {"params": biases, "lr": 5e-3}],
        lr=1e-2,
        amsgrad=True,
        foreach=False,
    )


def in_a_process_group(function: Callable[..., None]) -> Callable[..., None]:
    """The function, in a process group of all ranks if its layout needs one."""

    @functools.wraps(function)
    def run(directory: str, *, layout: str = "fsdp", **options: Any) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            torch.distributed.init_process_group("gloo")
        elif layout not in ("plain", "ddp"):
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        function(directory, layout=layout, **options)
        if torch.distributed.is_initialized():
            # torch 2.13: freeing a DDP module after its process group was seen to hang for ever.
            gc.collect()
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()

    return run


@in_a_process_group
def train(
    directory: str,
    *,
    layout: str,
    optimizer: str = "adamw",
    dropout: float = 0.0,
    tied: bool = False,
    ema: bool = False,
    batch_norm: bool = False,
    pull: str = "",
    transient: Collection[str] = (),
    epochs: int = 3,
    save_every: int = 3,
) -> None:
    """Trains in a layout with a loader; see the module's docstring.

    Args:
        directory: the run directory.
        layout: how the model is sharded.
        optimizer: which one.
        dropout: of the classifier.
        tied: whether two layers share a weight.
        ema: whether a second model of the same layout follows the first.
        batch_norm: whether every rank has running statistics of its own.
        pull: how averages of the weights, to which the weights are pulled, are kept in a variable:
            "in place" in a dict, or "replaced" in each step.
        transient: see ``Checkpointer``.
        epochs: to train.
        save_every: steps.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    bare = Classifier(tied=tied, dropout=dropout, batch_norm=batch_norm)
    model, num_replicas, replica = laid_out(bare, layout, num_ranks)
    optim = make_optimizer(optimizer, model)
    again = Classifier(tied=tied, batch_norm=batch_norm)
    follower = laid_out(again, layout, num_ranks)[0] if ema else None
    # Ranks that share a batch share the dropout masks too: what they replicate must stay alike.
    torch.manual_seed(replica + 10)
    data = Digits(NUM_SAMPLES, augment=False)
    sampler = DistributedSampler(
        data, num_replicas=num_replicas, rank=replica, shuffle=True, seed=3
    )
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // num_replicas, sampler=sampler)
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=optim,
        ema=follower,
        save_every=save_every,
        transient=set(transient),
    )
    averages = {name: each.detach().clone() for name, each in model.named_parameters()}
    for images, labels in checkpointer.batches(loader, epochs=epochs):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            for name, each in model.named_parameters() if pull else ():
                each.lerp_(averages[name], 0.3)
                average = averages[name] if pull == "in place" else averages[name].clone()
                averages[name] = average.lerp_(each, 0.1)
        if follower is not None:
            follow(follower, model)
        checkpointer.step(loss=loss)
    checkpointer.close()


@in_a_process_group
def take_over(
    directory: str,
    *,
    layout: str,
    optimizer: str = "adamw",
    tied: bool = False,
    ema: bool = False,
    num_steps: int = 4,
    num_beyond: int = 20,
) -> None:
    """One of several launches of a run, each in a layout of its own, by another number of ranks.

    It notes the whole state that it found, trains some steps, saves, notes the whole state that it
    saved, and then trains on without saving: its losses are what the next launch is compared with.

    Args:
        directory: the run directory.
        layout: how the model is sharded.
        optimizer: which one.
        tied: whether two layers share a weight.
        ema: whether a second model of the same layout follows the first.
        num_steps: to train before the save.
        num_beyond: to train after it.
    """
    rank = int(os.environ.get("RANK", "0"))
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0 if num_ranks == 4 else 99)  # what the others begin with must not matter
    model, num_replicas, replica = laid_out(Classifier(tied=tied), layout, num_ranks)
    optim = make_optimizer(optimizer, model)
    follower = laid_out(Classifier(tied=tied), layout, num_ranks)[0] if ema else None
    extras = {"steps": 0}
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=optim,
        ema=follower,
        extras=extras,
        allow_changes={"world_size"},
    )
    notes: dict[str, Any] = {"layout": f"{layout} on {num_ranks}"}
    digits = Digits(NUM_SAMPLES, augment=False)
    images, labels = digits.images, torch.tensor(digits.labels)
    with torch.no_grad():
        model(images)  # some layouts keep what they gather for it
    notes["resumed"] = checkpointer.resume().resumed
    notes["state_found"] = gathered(model, optim, follower)
    losses = []
    last = extras["steps"] + num_steps
    for step in range(extras["steps"], last + num_beyond):
        chosen = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(step))
        mine = chosen[:GLOBAL_BATCH][replica::num_replicas]
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optim.step()
        optim.zero_grad()
        if follower is not None:
            follow(follower, model)
        losses.append(mean_loss(loss))
        extras["steps"] = step + 1
        if step + 1 == last:
            checkpointer.save()
            notes["state_saved"] = gathered(model, optim, follower)
    notes["losses"] = losses
    if rank == 0:
        with (Path(directory).parent / "notes.jsonl").open("a") as file:
            file.write(json.dumps(notes) + "\n")
    checkpointer.close()


@in_a_process_group
def drift(directory: str, *, layout: str, tensor: str, validate: Any) -> None:
    """Takes a step, changes what the last rank holds of a tensor, and saves.

    Args:
        directory: the run directory.
        layout: how the model is sharded.
        tensor: the name of a parameter; with ``:exp_avg`` after it, that moment of it, and with
            ``:unstorable`` a value in its state that cannot be stored.
        validate: the option of that name.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model, _, _ = laid_out(Classifier(), layout, num_ranks)
    optim = make_optimizer("adamw", model)
    checkpointer = Checkpointer(directory, model=model, optimizer=optim, validate=validate)
    checkpointer.resume()
    model(torch.ones(4, 64)).sum().backward()
    optim.step()
    name, _, moment = tensor.partition(":")
    if int(os.environ["RANK"]) == num_ranks - 1:
        named = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in model.named_parameters()}
        value = named[name]
        if moment == "unstorable":
            optim.state[value][moment] = object()
        else:
            value = optim.state[value][moment] if moment else value
            local = value._local_tensor if isinstance(value, DTensor) else value.data
            local.view(-1)[:1] += 1
    checkpointer.save()
    checkpointer.close()


@torch.no_grad()
def follow(follower: nn.Module, model: nn.Module) -> None:
    """One step of an exponential moving average, part by part."""
    for slow, fast in zip(follower.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast.detach(), 0.1)


def mean_loss(loss: torch.Tensor) -> float:
    """The loss over the batches of all ranks."""
    value = loss.detach().clone()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(value)
        value /= torch.distributed.get_world_size()
    return float(value)


def gathered(
    model: nn.Module, optimizer: torch.optim.Optimizer, follower: nn.Module | None
) -> dict[str, list[int]]:
    """Every tensor there is, whole, by FQN; its bits as numbers. Collective."""
    model = model.model if isinstance(model, Holder) else model
    follower = follower.model if isinstance(follower, Holder) else follower
    if isinstance(model, FullyShardedDataParallel):
        return gathered_by_torch(model, optimizer)
    names = {id(p): n.removeprefix("module.") for n, p in model.named_parameters()}
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            state[f"{names[id(parameter)]}.{name}"] = value
    averaged = {} if follower is None else follower.state_dict()
    state.update({f"follower.{n.removeprefix('module.')}": v for n, v in averaged.items()})
    return {name: _bits(value) for name, value in state.items()}


@torch.no_grad()
def gathered_by_torch(
    model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer
) -> dict[str, list[int]]:
    """The same of a model under FSDP1, which gathers its parameters itself.

    Moments are copied into the parameters: torch 2.13 full_optim_state_dict gives exp_avg_sq
    under the name of exp_avg too where all is in host memory.
    """
    state = dict(summoned(model))
    parameters = list(model.parameters())
    values = [parameter.detach().clone() for parameter in parameters]
    moments = dict.fromkeys(key for state in optimizer.state.values() for key in state)
    every: list[list[str]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, list(moments))
    for moment in sorted({name for names in every for name in names}):
        for parameter in parameters:
            value = optimizer.state.get(parameter, {}).get(moment)
            parameter.copy_(torch.zeros(()) if value is None else value)
        state.update({f"{name}.{moment}": value for name, value in summoned(model)})
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
    return {
        name: _bits(value.reshape(-1)[:1] if name.endswith(".step") else value)
        for name, value in state.items()
    }


def summoned(model: FullyShardedDataParallel) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters, whole, by their names without wrappers. Collective."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        for name, parameter in model.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", ""), parameter.detach().clone()


def _bits(value: torch.Tensor) -> list[int]:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    bits: list[int] = whole.detach().contiguous().reshape(-1).view(torch.int32).tolist()
    return bits
