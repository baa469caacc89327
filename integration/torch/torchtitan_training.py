"""A loop with torchtitan's checkpoint manager, optimizers, schedulers and loader under FSDP2."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import destroy_process_group, get_rank, get_world_size, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan_manager import RunDirectoryManager

from resumekit.dcp import StorageWriter

NUM_STEPS, INTERVAL = 7, 2


class Rows(IterableDataset[torch.Tensor]):
    """Rows of this rank, from a position that it saves."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.position += 1
            seed = 1000 * get_rank() + self.position
            yield torch.randn(6, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, Any]:
        """The position."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues after it."""
        self.position = state["position"]


class Counts:
    """The ``train_state`` of torchtitan's Trainer."""

    step = ntokens_seen = 0

    def state_dict(self) -> dict[str, Any]:
        """Both counts."""
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Both counts."""
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


class KilledWriter(StorageWriter):
    """Ends rank 1 by SIGKILL when it is to write."""

    def write_data(self, *given: Any) -> Any:
        """Never on rank 1."""
        if get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(*given)


def train(directory: str, *, mode: str = "disabled", killed_at: int = 0, exclude: str = "") -> None:
    """Trains to the last step, from the newest checkpoint.

    Args:
        directory: of the run directory, and of what each rank notes.
        mode: of the saves.
        killed_at: the step whose save rank 1 does not survive.
        exclude: what is not loaded.
    """
    init_process_group("gloo")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 17), nn.LayerNorm(17), nn.Linear(17, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (get_world_size(),)))
    config = default_adamw(lr=1e-2)
    config.implementation = "for-loop"
    optimizers = config.build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(warmup_steps=2)
    schedulers = schedule.build(optimizers=optimizers, training_steps=NUM_STEPS)
    loader = ParallelAwareDataloader(Rows(), get_rank(), get_world_size(), batch_size=4)
    counts = Counts()
    manager = RunDirectoryManager.Config(
        enable=True,
        folder="run",
        interval=INTERVAL,
        keep_latest_k=2,
        last_save_model_only=False,
        async_mode=mode,
        exclude_from_loading=[exclude] if exclude else [],
    ).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": counts},
        sd_adapter=None,
        base_folder=directory,
    )
    manager.load()
    notes: dict[str, Any] = {"first": counts.step, "losses": [], "samples": [], "rates": []}
    batches = iter(loader)
    while counts.step < NUM_STEPS:
        batch = next(batches)
        optimizers.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizers.step()
        schedulers.step()
        counts.step += 1
        counts.ntokens_seen += batch.numel()
        notes["losses"].append(loss.item())
        notes["samples"].append(batch)
        notes["rates"].append(schedulers.schedulers[0].get_last_lr())
        if counts.step == killed_at:
            import torchtitan_manager

            torchtitan_manager.StorageWriter = KilledWriter  # type: ignore[misc]
        manager.save(counts.step, last_step=counts.step == NUM_STEPS)
    manager.maybe_wait_for_saving()
    manager.close()
    notes["weights"] = [each.to_local().detach() for each in model.parameters()]  # type: ignore[attr-defined]
    notes["counts"] = counts.state_dict()
    torch.save(notes, Path(directory) / f"notes-{get_rank()}.pt")
    destroy_process_group()
