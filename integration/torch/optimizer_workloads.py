"""A training function whose optimizer trains more than the model, or that clears no gradients.

One loop for all of them, on scikit-learn's handwritten digits. It never looks at whether it was
started before.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from digits import Digits
from sharded_workloads import GLOBAL_BATCH, NUM_SAMPLES, Classifier, in_a_process_group, laid_out
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from resumekit.adapters.torch import Checkpointer


class HeadLoss(nn.Module):
    """A loss that refers to the model and has a trained head, like SoftmaxLoss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head = nn.Linear(10, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.model(images)), labels)


class Outside:
    """What is trained beside the model, in one of the ways that scripts do it.

    Args:
        where: ``"bare"``, ``"list"`` (layers in a plain list), ``"head"`` or ``"none"``.
        model: the model.
        layout: of the model; the layers of a list are sharded too under FSDP2.
    """

    def __init__(self, where: str, model: nn.Module, layout: str) -> None:
        self.model = model
        self.temperature = torch.full((3,), 0.4, requires_grad=where == "bare")
        self.layers = [nn.Linear(10, 10), nn.Linear(10, 10)] if where == "list" else []
        self.loss = HeadLoss(model) if where == "head" else None
        if layout == "fsdp":
            mesh = init_device_mesh("cpu", (int(os.environ.get("WORLD_SIZE", "1")),))
            for layer in self.layers:
                fully_shard(layer, mesh=mesh)

    def parameters(self) -> list[torch.Tensor]:
        bare = [self.temperature] if self.temperature.requires_grad else []
        head = [] if self.loss is None else list(self.loss.head.parameters())
        return [*bare, *(p for layer in self.layers for p in layer.parameters()), *head]

    def __call__(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.loss is not None:
            return self.loss(images, labels)
        outputs = self.model(images)
        for layer in self.layers:
            outputs = torch.tanh(layer(outputs))
        return nn.functional.cross_entropy(outputs * self.temperature.exp().sum(), labels)

    def average_gradients(self) -> None:
        """The mean over the ranks, which no wrapper takes here."""
        for parameter in self.parameters():
            if dist.is_initialized() and not isinstance(parameter, DTensor):
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def train(directory: str, *, layout: str = "plain", **options: Any) -> None:
    """Trains; see ``_train`` for the options and the module's docstring."""
    in_a_process_group(_train)(directory, layout=layout, **options)


def _train(
    directory: str,
    *,
    layout: str,
    where: str = "none",
    clears: str = "bottom",
    clip: bool = False,
    groups: bool = False,
    late: bool = False,
    optimizer: str = "adamw",
    epochs: int = 3,
    save_every: int = 3,
    checkpoint: dict[str, Any] | None = None,
) -> None:
    """Trains; see the module's docstring.

    Args:
        directory: the run directory.
        layout: how the model is sharded.
        where: what is trained beside the model.
        clears: where gradients are cleared: ``"top"``, ``"bottom"``, ``"before backward"`` or
            ``"never"``; ``"top zero"`` and ``"bottom zero"`` fill them with zeros.
        clip: whether gradients are clipped.
        groups: whether the additional parameters are a param group of their own.
        late: whether that group is added when the Checkpointer exists.
        optimizer: which one.
        epochs: to train.
        save_every: steps.
        checkpoint: further options of the Checkpointer.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model, num_replicas, replica = laid_out(Classifier(), layout, num_ranks)
    outside = Outside(where, model, layout)
    trained, more = list(model.parameters()), outside.parameters()
    is_apart = groups or late
    first = [{"params": trained}, {"params": more}] if groups and not late else [*trained, *more]
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    optim = kind(trained if late else first, lr=1e-3, foreach=False)
    torch.manual_seed(replica + 10)
    data = Digits(NUM_SAMPLES, augment=False)
    sampler = DistributedSampler(
        data, num_replicas=num_replicas, rank=replica, shuffle=True, seed=3
    )
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // num_replicas, sampler=sampler)
    checkpointer = Checkpointer(
        directory, model=model, optimizer=optim, save_every=save_every, **(checkpoint or {})
    )
    if late and is_apart:
        optim.add_param_group({"params": more})
    checkpointer.resume()

    def note() -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            values = [p.tolist() for p in whole(outside.parameters())]
            with (Path(directory).parent / "values.jsonl").open("a") as file:
                file.write(json.dumps([checkpointer.progress.step, values]) + "\n")

    note()
    for images, labels in checkpointer.batches(loader, epochs=epochs):
        if clears.startswith("top"):
            optim.zero_grad(set_to_none=clears == "top")
        loss = outside(images, labels)
        if clears == "before backward":
            optim.zero_grad()
        loss.backward()
        if clears != "never":
            outside.average_gradients()
        if clip:
            nn.utils.clip_grad_norm_(trained, 1.0)
        optim.step()
        if clears.startswith("bottom"):
            optim.zero_grad(set_to_none=clears == "bottom")
        checkpointer.step(loss=loss)
        note()
    checkpointer.close()


def whole(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """The values of the parameters that every rank has whole."""
    return [parameter.detach() for parameter in parameters if not isinstance(parameter, DTensor)]
