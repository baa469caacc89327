"""Programs that save by ``dcp.save`` or load by ``dcp.load``, and note what their ranks have."""

from __future__ import annotations

import json
import os
import threading
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
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from resumekit.dcp import StorageReader, StorageWriter
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


# ---------------------------------------------------------------- saves


def trained(layout: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model in a layout and its optimizer, after three steps."""
    torch.manual_seed(5)
    model, _, _ = laid_out(Classifier(), layout, int(os.environ.get("WORLD_SIZE", "1")))
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer)
    return model, optimizer


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Three steps, in which every rank has the same data."""
    for _ in range(3):
        model(torch.ones(4, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@in_a_process_group
def save(directory: str, *, layout: str) -> None:
    """Saves a model, its optimizer and other values, and notes them."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    model, optimizer = trained(layout)
    model_state, optim_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optim_state, "shared": shared()}
    state[f"own.{os.environ.get('RANK', '0')}"] = ("rank", torch.ones(2), {"a.b": torch.ones(3)})
    dcp.save(state, storage_writer=StorageWriter(directory), checkpoint_id="step-3")
    note(directory, {"state": gathered(model, optimizer, None)})


def shared() -> dict[str, Any]:
    """What every rank has."""
    large, generator = torch.arange(70_000.0), torch.Generator().manual_seed(3)
    return {"large": large, "pair": (1, large[:3]), "random": generator.get_state(), "a.b": [1, 2]}


@in_a_process_group
def load_others(directory: str, *, layout: str = "plain") -> None:
    """Notes whether values that are no part of the model are as they were saved."""
    reader, state = StorageReader(directory), {"shared": shared()}
    with torch.no_grad():
        for each in state["shared"].values():
            if isinstance(each, torch.Tensor):
                each.zero_()
    state["shared"] |= {"pair": None, "a.b": None}
    owned: dict[str, Any] = {f"own.{rank}": None for rank in range(2)}
    dcp.load(state | owned, storage_reader=reader)
    dcp.load(owned, storage_reader=reader)
    expected, found = shared(), state["shared"]
    notes = {
        "large": torch.equal(found["large"], expected["large"]),
        "random": torch.equal(found["random"], expected["random"]),
        "pair": [found["pair"][0], found["pair"][1].tolist()],
        "a.b": found["a.b"],
        "own": [[each[0], each[1].tolist(), each[2]["a.b"].tolist()] for each in owned.values()],
    }
    note(directory, notes)


class Failing(DefaultSavePlanner):
    """Has no data."""

    def resolve_data(self, write_item: Any) -> Any:
        raise KeyError("no data")


@in_a_process_group
def fail(directory: str, *, layout: str = "", how: str) -> None:
    """A save that fails on the second rank, between two that do not; notes the errors.

    Args:
        directory: the run directory.
        layout: not used.
        how: the fault.
    """
    rank = dist.get_rank()
    state: dict[str, Any] = {"whole": torch.arange(8.0), f"own.{rank}": torch.ones(2)}
    dcp.save(state, storage_writer=StorageWriter(directory), checkpoint_id="step-1")
    bad, planner, name, no_dist = state, DefaultSavePlanner(), "step-2", False
    if rank == 1:
        if how == "value":
            bad = {**state, "mine": {"it": [1, threading.Event]}}
        elif how == "planner":
            planner = Failing()
        elif how == "name":
            name = "step-3"
    if how == "shape" and rank == 1:
        bad = {**state, "whole": torch.arange(9.0)}
    elif how == "one rank":
        mesh = init_device_mesh("cpu", (2,))
        bad, no_dist = {"sharded": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}, True
        dist.barrier()
    notes: dict[str, Any] = {"failures": {}}
    try:
        writer = StorageWriter(directory)
        dcp.save(bad, storage_writer=writer, checkpoint_id=name, planner=planner, no_dist=no_dist)
    except CheckpointException as error:
        notes["failures"] = {each: repr(found[0]) for each, found in error.failures.items()}
    dist.barrier()
    notes["left"] = sorted(path.name for path in Path(directory).glob("*/step-*"))
    notes["steps"] = sorted(path.name for path in Path(directory).glob("step-*"))
    dist.barrier()
    dcp.save(state, storage_writer=StorageWriter(directory), checkpoint_id="step-4")
    note(directory, notes)


@in_a_process_group
def save_in_background(
    directory: str, *, layout: str, own_group: bool = True, in_process: bool = False
) -> None:
    """Saves in the background while training continues; notes what was saved, or the error.

    Args:
        directory: the run directory.
        layout: how the model is sharded.
        own_group: whether the saves have a process group of their own.
        in_process: whether another process saves.
    """
    group = dist.new_group(backend="gloo") if own_group else None
    model, optimizer = trained(layout)
    kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
    writer = StorageWriter(directory, process_group=group, keep_latest=1)
    notes: dict[str, Any] = {}
    for step in (3, 6, 9):
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optim_state}
        notes["state"] = gathered(model, optimizer, None)
        try:
            future: Any = dcp.async_save(
                state,
                storage_writer=writer,
                checkpoint_id=f"step-{step}",
                process_group=group,
                async_checkpointer_type=kind,
            )
        except ResumekitError as error:
            notes["error"] = str(error)
            break
        train(model, optimizer)
        future.result()
    note(directory, notes)
