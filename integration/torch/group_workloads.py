"""Training functions whose ranks form groups: those of a node, those that take the same data.

Nothing looks at whether it was started before.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from digits import Digits
from sharded_workloads import NUM_SAMPLES, in_a_process_group
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import resumekit
from resumekit import SharingPattern, StateComponent
from resumekit.adapters.torch import Checkpointer
from resumekit.data import DistributedResumableSampler


class Cache:
    """User-defined state that the ranks of a node have in common."""

    def __init__(self, node: int) -> None:
        self.value = torch.tensor([float(node)])

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value.copy_(state["value"])


@in_a_process_group
def train_on_nodes(
    directory: str,
    *,
    layout: str = "",
    num_nodes: int = 2,
    drift: bool = False,
) -> None:
    """Trains one layer on ranks that say they are on several nodes.

    Args:
        directory: the run directory.
        layout: not used.
        num_nodes: the nodes among which the ranks are divided, the last one taking the rest.
        drift: whether the ranks of a node differ.
    """
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    node = min(rank // (num_ranks // num_nodes), num_nodes - 1)
    os.environ["GROUP_RANK"] = str(node)  # as torchrun does
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cache = Cache(node)
    data = Digits(NUM_SAMPLES, augment=False)
    loader = DataLoader(data, 6, sampler=DistributedSampler(data, seed=3))
    checkpointer = resumekit.Checkpointer(
        directory,
        components=[
            StateComponent("model", model),
            StateComponent("optimizer", optimizer),
            StateComponent("callbacks/cache", cache, lambda: SharingPattern.PER_NODE),
        ],
        save_every=3,
    )
    for images, labels in checkpointer.batches(loader, epochs=2):
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        cache.value += node + 1 + (rank if drift and node == 1 else 0)
        checkpointer.step(loss=loss)
    checkpointer.close()


@in_a_process_group
def share_data(
    directory: str,
    *,
    layout: str = "",
    num_replicas: int = 1,
    num_steps: int = 3,
    may_change: bool = True,
) -> None:
    """One of several launches of one epoch, in which some ranks take the same data.

    The ranks that begin a replica note which samples it took, and the count of samples.

    Args:
        directory: the run directory.
        layout: not used.
        num_replicas: of the data; the ranks are divided among them.
        num_steps: to train.
        may_change: whether this launch accepts other ranks and batches.
    """
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    alike = num_ranks // num_replicas
    replica = rank // alike
    torch.manual_seed(replica)
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    data = TensorDataset(torch.arange(float(NUM_SAMPLES))[:, None])
    sampler = DistributedResumableSampler(data, seed=3, num_replicas=num_replicas, rank=replica)
    loader = DataLoader(data, 4 // num_replicas, sampler=sampler)
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_parallel_group=list(range(rank % alike, num_ranks, alike)),
        allow_changes={"world_size", "batch_size"} if may_change else set(),
        transient={"seen"},  # of this launch
    )
    seen: list[int] = []
    drawn = 0.0
    for (batch,) in checkpointer.batches(loader, epochs=1):
        seen += [int(sample) for sample in batch[:, 0]]
        drawn = float(torch.rand(()))
        checkpointer.step()
        if len(seen) == num_steps * (4 // num_replicas):
            break
    checkpointer.save()
    checkpointer.close()
    with (Path(directory).parent / f"notes-{num_ranks}-{num_replicas}-{rank}.json").open(
        "w"
    ) as file:
        file.write(json.dumps([seen, checkpointer.progress.samples, drawn]))
