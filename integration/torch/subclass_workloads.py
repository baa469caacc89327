"""A training function whose moments and weights are tensors made of others.

With the optimizers of torchao, or with classes of the tests' own. It writes each loss, and at its
end the inner tensors, so that a test compares them without the library.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from digits import Digits
from sharded_workloads import in_a_process_group
from tensor_classes import CodedMomentum, Refined, Rows, plain_parts
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from resumekit.adapters.torch import Checkpointer

NUM_SAMPLES, BATCH_SIZE = 96, 8  # 12 steps an epoch on one rank


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """The optimizer of this name; those of torchao without the compiler."""
    if name == "coded":
        return CodedMomentum(parameters)
    from torchao import optim

    torch.compiler.set_stance("force_eager")
    kind = getattr(optim, name)
    return kind(parameters, lr=torch.tensor(0.01), block_size=128)  # type: ignore[no-any-return]


def quantize(layer: nn.Linear, weights: str) -> None:
    """Makes the weight of a layer one of a class that is not trained by gradients."""
    if weights == "rows":
        layer.weight = nn.Parameter(Rows.of(layer.weight.detach()), requires_grad=False)
    elif weights == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(layer, Int8WeightOnlyConfig())
        layer.weight.requires_grad_(False)


def train(directory: str, *, layout: str = "plain", **options: Any) -> None:
    """Trains; see ``_train``."""
    in_a_process_group(_train)(directory, layout=layout, **options)


def _train(
    directory: str,
    *,
    layout: str,
    optimizer: str = "coded",
    weights: str = "plain",
    rounds: bool = False,
    epochs: int = 2,
    checkpoint: dict[str, Any] | None = None,
) -> None:
    """Trains a classifier of digits.

    Args:
        directory: the run directory.
        layout: ``"plain"``, ``"ddp"`` or ``"fsdp"``.
        optimizer: ``"coded"`` or a class of torchao.
        weights: of the first layer: ``"plain"``, ``"rows"`` (which change) or ``"int8"``.
        rounds: a launch that continues quantizes the values of the moments again, as a checkpoint
            of values would.
        epochs: to train.
        checkpoint: further options of the Checkpointer.
    """
    rank, num_ranks = (int(os.environ.get(n, d)) for n, d in (("RANK", "0"), ("WORLD_SIZE", "1")))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    first, last = nn.Linear(64, 128), nn.Linear(32, 10)
    bare = nn.Sequential(first, nn.Dropout(0.1), nn.ReLU(), nn.Linear(128, 32), last)
    quantize(first, weights)
    model: nn.Module = nn.parallel.DistributedDataParallel(bare) if layout == "ddp" else bare
    if layout == "fsdp":
        fully_shard(bare)
    trained = [each for each in model.parameters() if each.requires_grad]
    optim = make_optimizer(optimizer, trained)
    data = Digits(NUM_SAMPLES, augment=False)
    sampler: Any = DistributedSampler(data, num_ranks, rank) if num_ranks > 1 else None
    loader = DataLoader(data, BATCH_SIZE // num_ranks, shuffle=sampler is None, sampler=sampler)
    average = Refined.of(torch.zeros(10, 4))
    extras = {"average": average}
    checkpointer = Checkpointer(
        directory, model=model, optimizer=optim, extras=extras, save_every=3, **(checkpoint or {})
    )
    with checkpointer, Path(directory, f"losses-{rank}").open("a") as losses:
        resumed_at = checkpointer.resume().step or -1
        for images, labels, *_ in checkpointer.batches(loader, epochs=epochs):
            if rounds and checkpointer.progress.step == resumed_at:
                for state in optim.state.values():
                    for each in state.values():
                        if hasattr(each, "__tensor_flatten__"):
                            each.copy_(each.dequantize())
            outputs = model(images)
            loss = nn.functional.cross_entropy(outputs, labels)
            loss.backward()
            optim.step()
            optim.zero_grad()
            with torch.no_grad():
                if isinstance(first.weight, Rows):
                    first.weight.set_to(0.99 * first.weight.dequantize())
                if layout != "fsdp":  # the same on all ranks
                    average.set_to(0.9 * average.dequantize() + last.weight[:, :4])
            checkpointer.step(loss=loss)
            losses.write(f"{checkpointer.progress.step} {loss.item().hex()}\n")
            losses.flush()
    torch.save(dict(_inner_tensors(bare, optim, extras)), Path(directory, f"end-{rank}.pt"))


def _inner_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, extras: dict[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        yield from plain_parts(parameter.detach(), name).items()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                yield from plain_parts(value, f"{name}: {key}").items()
    yield from plain_parts(extras["average"], "average").items()
