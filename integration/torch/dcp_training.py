"""A training loop in the manner of torchtitan: FSDP2, ``dcp.save`` and ``dcp.load`` of all state.

It never looks at whether it was started before, but for asking whether there is a step to load.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from resumekit.dcp import StorageReader, StorageWriter

NUM_STEPS, SAVE_EVERY = 6, 2


class App(Stateful):
    """The model and the optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class Batches(Stateful):
    """The data of this rank, with its position."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __next__(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.rank + self.position)
        self.position += 1
        return torch.randn(4, 6, generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "taken": ("batches", (self.rank, self.position))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["taken"] == ("batches", (self.rank, state["position"]))
        self.position = state["position"]


class Random(Stateful):
    """The random state of this rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"torch": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["torch"])


class KilledWriter(dcp.FileSystemWriter):
    """The stock writer, whose process is killed before it writes the files of a save."""

    def write_data(self, *_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def train(
    directory: str, *, stock: bool = False, last: int = NUM_STEPS, killed_at: int = 0
) -> None:
    """Trains, and notes after each load and step what this rank has.

    Args:
        directory: the run directory.
        stock: save with torch's own writer, again and again to this directory.
        last: the step to end with.
        killed_at: with the stock writer, the step in whose save the last rank is killed.
    """
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Linear(9, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(8 + rank)
    app, batches, progress = App(model, optimizer), Batches(rank), {"step": 0}
    state: dict[str, Any] = {
        "app": app,
        "lr_scheduler": scheduler,
        "progress": progress,
        f"batches.{rank}": batches,
        f"random.{rank}": Random(),
    }
    notes = Path(directory).parent / f"notes-{rank}.jsonl"
    if is_begun(Path(directory)):
        app.state_dict()  # torch makes the moments that are loaded
        reader: Any = dcp.FileSystemReader(directory) if stock else StorageReader(directory)
        dcp.load(state, storage_reader=reader)
        progress = state["progress"]
        note(notes, "loaded", progress["step"], app)
    writer: Any = None if stock else StorageWriter(directory, keep_latest=1)
    while progress["step"] < last:
        model(next(batches)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        progress["step"] += 1
        note(notes, "trained", progress["step"], app)
        if progress["step"] % SAVE_EVERY == 0:
            if stock:
                is_killed = progress["step"] == killed_at and rank == world_size - 1
                writer = (KilledWriter if is_killed else dcp.FileSystemWriter)(directory)
            dcp.save(
                state,
                storage_writer=writer,
                checkpoint_id=directory if stock else f"step-{progress['step']}",
            )
    dist.destroy_process_group()


def is_begun(directory: Path) -> bool:
    """Whether there is a step to load."""
    return any(directory.glob("step-*")) or (directory / ".metadata").exists()


def note(path: Path, event: str, step: int, app: App) -> None:
    """Adds a line with a digest of all bits of this rank."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for parameter in app.model.parameters():
        for each in (parameter, *app.optimizer.state[parameter].values()):
            local = each.to_local() if hasattr(each, "to_local") else each
            digest.update(local.detach().numpy().tobytes())
    digest.update(repr(app.optimizer.param_groups[0]["lr"]).encode())
    line = {"event": event, "step": step, "digest": digest.hexdigest()}
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def launch(directory: str, **options: Any) -> None:
    """Trains, and leaves at once."""
    status = 0
    try:
        train(directory, **options)
    except BaseException:  # noqa: BLE001 - torch's CheckpointException is no Exception
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
