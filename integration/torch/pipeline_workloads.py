"""Training functions whose model is cut into pipeline stages, each kept by one or several ranks.

The stages keep the names that their parameters have in the whole model. Nothing looks at whether it
was started before.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from digits import Digits
from sharded_workloads import GLOBAL_BATCH, NUM_SAMPLES, in_a_process_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

import resumekit
from resumekit import SharingPattern, StateComponent
from resumekit.adapters.torch import Checkpointer

NUM_LAYERS = 4
WIDTH = 34


class Classifier(nn.Module):
    """Layers that can be given to several ranks: what a rank does not hold is not there."""

    def __init__(self, numbers: range, *, dropout: float, buffer: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(64, WIDTH) if 0 in numbers else None
        self.layers = nn.ModuleDict({str(each): _layer(each, dropout) for each in numbers})
        self.head = nn.Linear(WIDTH, 10) if NUM_LAYERS - 1 in numbers else None
        if buffer and 0 in numbers:
            self.register_buffer("seen", torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            hidden = torch.tanh(self.embed(hidden))
        for layer in self.layers.values():
            hidden = torch.tanh(layer(hidden))
        return hidden if self.head is None else self.head(hidden)


def _layer(number: int, dropout: float) -> nn.Module:
    """A layer with the values that its number says, in whichever process it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        linear = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(linear, nn.LayerNorm(WIDTH), nn.Dropout(dropout))


class Pipeline:
    """The stage of this rank, and how a batch goes through all of them.

    Args:
        num_stages: of the model; the ranks are divided among them.
        style: how the ranks of a stage share its batches: ``"ddp"``, ``"fsdp"``, or ``"alone"``.
        num_layers: of the model.
    """

    def __init__(
        self,
        num_stages: int,
        style: str,
        *,
        dropout: float = 0.0,
        buffer: bool = False,
        num_layers: int = NUM_LAYERS,
    ) -> None:
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        self._style = style
        self.num_replicas = num_ranks // num_stages
        shape, names = (num_stages, self.num_replicas), ("stages", "replicas")
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.stage, self.replica = self.mesh.get_coordinate() or (0, 0)
        self.is_last = self.stage == num_stages - 1
        length = num_layers // num_stages
        numbers = range(self.stage * length, (self.stage + 1) * length)
        torch.manual_seed(0)
        self.model: Any = Classifier(numbers, dropout=dropout, buffer=buffer)
        if style == "fsdp":
            fully_shard(self.model, mesh=self.mesh["replicas"])
        pipe = PipelineStage(
            self.model,
            self.stage,
            num_stages,
            torch.device("cpu"),
            group=self.mesh["stages"].get_group(),
        )
        loss = nn.functional.cross_entropy
        self._schedule = ScheduleGPipe(pipe, n_microbatches=2, loss_fn=loss)

    def backward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Forward and backward; the loss, which is zero on ranks that do not see it."""
        losses: list[torch.Tensor] = []
        given = (images,) if self.stage == 0 else ()
        wanted: dict[str, Any] = {"target": labels, "losses": losses} if self.is_last else {}
        self._schedule.step(*given, **wanted)
        if self._style == "ddp":
            # torch 2.13: DistributedDataParallel itself breaks on a second micro-batch.
            for parameter in self.model.parameters():
                torch.distributed.all_reduce(parameter.grad, group=self.mesh.get_group("replicas"))
                parameter.grad /= self.num_replicas
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Two param groups, whatever the stage holds of each."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": rate / 2}]
    return torch.optim.AdamW(groups, lr=rate, foreach=False)


@in_a_process_group
def train(
    directory: str,
    *,
    layout: str = "",
    num_stages: int = 2,
    style: str = "ddp",
    declared: str = "sharded",
    own_rates: bool = False,
    buffer: bool = False,
    epochs: int = 2,
    save_every: int = 3,
) -> None:
    """Trains a pipeline with a loader.

    Args:
        directory: the run directory.
        layout: not used.
        num_stages: of the model.
        style: how the ranks of a stage share its batches.
        declared: ``"sharded"``, one logical state, or ``"by group"``, one state for each stage.
        own_rates: whether every stage has a learning rate of its own.
        buffer: whether the first stage has a buffer that differs between its ranks.
        epochs: to train.
        save_every: steps.
    """
    pipeline = Pipeline(num_stages, style, dropout=0.1, buffer=buffer)
    model = pipeline.model
    optimizer = make_optimizer(model, 1e-2 * (pipeline.stage + 1 if own_rates else 1))
    torch.manual_seed(int(os.environ.get("RANK", "0")) + 10)
    data = Digits(NUM_SAMPLES, augment=False)
    sampler = DistributedSampler(
        data, pipeline.num_replicas, pipeline.replica, shuffle=True, seed=3
    )
    loader = DataLoader(data, GLOBAL_BATCH // pipeline.num_replicas, sampler=sampler)
    checkpointer: resumekit.Checkpointer
    if declared == "sharded":
        checkpointer = Checkpointer(
            directory,
            model=model,
            optimizer=optimizer,
            stage_group=pipeline.mesh["replicas"],
            save_every=save_every,
        )
    else:
        checkpointer = resumekit.Checkpointer(
            directory,
            components=by_group(model, optimizer),
            groups={"stage": pipeline.mesh["replicas"].get_group()},
            save_every=save_every,
        )
    for images, labels in checkpointer.batches(loader, epochs=epochs):
        loss = pipeline.backward(images, labels)
        optimizer.step()
        optimizer.zero_grad()
        if hasattr(model, "seen"):
            model.seen += len(images) * (pipeline.replica + 1)
        checkpointer.step(loss=loss)
    checkpointer.close()


def by_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[StateComponent]:
    """The list of a custom trainer: one state for each stage, and one for each node."""
    stage = {"sharing_pattern": SharingPattern.PER_GROUP, "process_group": "stage"}
    return [
        StateComponent("model", model, **stage),  # type: ignore[arg-type]
        StateComponent("optimizer", optimizer, **stage),  # type: ignore[arg-type]
    ]


@in_a_process_group
def take_over(
    directory: str,
    *,
    layout: str = "",
    num_stages: int = 1,
    style: str = "alone",
    num_layers: int = NUM_LAYERS,
    own_rates: bool = False,
    num_steps: int = 4,
    num_beyond: int = 20,
) -> None:
    """One of several launches of a run, each cut in another way; see ``sharded_workloads``.

    Args:
        directory: the run directory.
        layout: not used.
        num_stages: of the model.
        style: how the ranks of a stage share its batches.
        num_layers: of the model.
        own_rates: whether every stage begins with a learning rate of its own.
        num_steps: to train before the save.
        num_beyond: to train after it.
    """
    pipeline = Pipeline(num_stages, style, num_layers=num_layers)
    model = pipeline.model
    with torch.no_grad():  # what the others begin with must not matter
        for parameter in model.parameters():
            parameter.add_(torch.distributed.get_world_size())
    optimizer = make_optimizer(model, 1e-2 * (pipeline.stage + 1 if own_rates else 1))
    extras = {"steps": 0}
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=optimizer,
        stage_group=pipeline.mesh["replicas"],
        extras=extras,
        allow_changes={"world_size"},
    )
    notes: dict[str, Any] = {
        "layout": f"{num_stages} stages, {style}, {pipeline.num_replicas} ranks"
    }
    notes["resumed"] = checkpointer.resume().resumed
    notes["state_found"] = gathered(model, optimizer)
    digits = Digits(NUM_SAMPLES, augment=False)
    images, labels = digits.images, torch.tensor(digits.labels)
    losses = []
    last = extras["steps"] + num_steps
    for step in range(extras["steps"], last + num_beyond):
        chosen = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(step))
        mine = chosen[:GLOBAL_BATCH][pipeline.replica :: pipeline.num_replicas]
        loss = pipeline.backward(images[mine], labels[mine])
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(loss)
        losses.append(float(loss) / pipeline.num_replicas)
        extras["steps"] = step + 1
        if step + 1 == last:
            checkpointer.save()
            notes["state_saved"] = gathered(model, optimizer)
    notes["losses"] = losses
    if torch.distributed.get_rank() == 0:
        with (Path(directory).parent / "notes.jsonl").open("a") as file:
            file.write(json.dumps(notes) + "\n")
    checkpointer.close()


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every tensor of all stages, whole, by FQN, and every parameter's rate. Collective."""
    names = {id(p): n.removeprefix("module.") for n, p in model.named_parameters()}
    mine = {names[id(p)]: _bits(p) for p in model.parameters()}
    for parameter, values in optimizer.state.items():
        mine |= {f"{names[id(parameter)]}.{name}": _bits(value) for name, value in values.items()}
    for group in optimizer.param_groups:
        mine |= {f"{names[id(p)]}.lr": group["lr"] for p in group["params"]}
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    return {name: value for each in every for name, value in sorted(each.items())}


def _bits(value: torch.Tensor) -> list[int]:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    bits: list[int] = whole.detach().contiguous().reshape(-1).view(torch.int32).tolist()
    return bits
