"""Programs that load a checkpoint by ``dcp.load`` and note what their ranks have then."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pipeline_workloads
import torch
from sharded_workloads import Classifier, gathered, in_a_process_group, laid_out, make_optimizer
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from resumekit.dcp import StorageReader
from resumekit.errors import ResumekitError


class Late(StorageReader):
    """Reads when it copies."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan


def note(directory: str, notes: dict[str, Any]) -> None:
    """Collects the notes of all ranks in rank order. Collective."""
    every: list[Any] = [notes]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, notes)
    if int(os.environ.get("RANK", "0")) == 0:
        with (Path(directory).parent / "loads.jsonl").open("a") as file:
            file.write(json.dumps(every) + "\n")


def local_values(state: Any) -> dict[str, Any]:
    """Copies of the tensors of this rank."""
    if isinstance(state, dict):
        return {f"{k}.{n}": v for k, each in state.items() for n, v in local_values(each).items()}
    if isinstance(state, ShardedTensor):  # of FSDP1
        return {f"{n}": shard.tensor.clone() for n, shard in enumerate(state.local_shards())}
    value = state.to_local() if isinstance(state, DTensor) else state
    return {"": value.clone()} if isinstance(value, torch.Tensor) else {}


@in_a_process_group
def load(directory: str, *, layout: str, optimizer: str = "adamw", is_late: bool = False) -> None:
    """Loads the newest step into another model in a layout.

    Args:
        directory: the run directory.
        layout: how the model is sharded.
        optimizer: which one.
        is_late: whether the blocks are verified only when they are copied.
    """
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    torch.manual_seed(99)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    model, _, _ = laid_out(Classifier(), layout, num_ranks)
    optim = make_optimizer(optimizer, model)
    rates = [group["lr"] for group in optim.param_groups]
    for group in optim.param_groups:
        group["lr"] *= 3
    model_state, optim_state = get_state_dict(model, optim)
    state: dict[str, Any] = {"model": model_state, "optimizer": optim_state}
    before = local_values(state)
    reader = (Late if is_late else StorageReader)(directory)
    failures: dict[int, str] = {}
    try:
        # Of the parameter that never had a gradient, no checkpoint has moments.
        dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(allow_partial_load=True))
    except CheckpointException as error:
        failures = {rank: repr(each[0]) for rank, each in error.failures.items()}
    after = local_values(state)
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    notes: dict[str, Any] = {"failures": failures, "changed": changed}
    if not failures:
        set_state_dict(
            model,
            optim,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        notes["state"] = gathered(model, optim, None)
        notes["rates"] = [group["lr"] for group in optim.param_groups] == rates
    note(directory, notes)


@in_a_process_group
def choose(directory: str, *, layout: str, others: str, ranks: Sequence[int] = (0, 1)) -> None:
    """Notes which checkpoint each rank of a group reads.

    Args:
        directory: what the first one is given.
        layout: has no meaning here.
        others: what the other one is given.
        ranks: those of the group.
    """
    rank, notes = dist.get_rank(), {}
    group = dist.new_group(ranks)
    if rank in ranks:
        path = directory if rank == ranks[0] else others
        is_default = len(ranks) == dist.get_world_size()
        reader = StorageReader(path, process_group=None if is_default else group)
        try:
            reader.set_up_storage_reader(reader.read_metadata(), rank == ranks[0])
            notes = {"step": reader.step_directory.name}
        except ResumekitError as error:
            notes = {"error": type(error).__name__}
    note(directory, notes)


@in_a_process_group
def load_stages(directory: str, *, layout: str = "", num_stages: int, style: str = "alone") -> None:
    """Loads the newest step into stages of a pipeline, with the flat form of the optimizer.

    Args:
        directory: the run directory.
        layout: not used.
        num_stages: of the model.
        style: how the ranks of a stage share its batches.
    """
    pipeline = pipeline_workloads.Pipeline(num_stages, style)
    model = pipeline.model
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(99)
    optimizer = pipeline_workloads.make_optimizer(model, 0.5)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optim_state = get_state_dict(model, optimizer, options=options)
    state: dict[str, Any] = {"model": model_state, "optimizer": optim_state}
    dcp.load(state, storage_reader=StorageReader(directory))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    note(directory, {"state": pipeline_workloads.gathered(model, optimizer)})
