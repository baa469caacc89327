"""Ranks that do not agree, and ranks that die or stop while the others wait for them."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import resumekit
from resumekit import SharingPattern, StateComponent, cadence
from resumekit.adapters.torch import Checkpointer
from resumekit.errors import SaveError, SharedDirectoryError
from resumekit.state import ComponentState

SILENT_SECONDS = 4


def disagree_on_variables(directory: str) -> None:
    """Trains on two ranks of which only the second one has a scheduler."""
    torch.distributed.init_process_group("gloo")
    net = nn.Linear(2, 1)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    is_odd = torch.distributed.get_rank() == 1
    sched = torch.optim.lr_scheduler.StepLR(opt, 3) if is_odd else None
    loader = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=1)
    checkpointer = Checkpointer(directory)
    for (batch,) in checkpointer.batches(loader, epochs=1):
        net(batch).sum().backward()
        opt.step()
        if sched is not None:
            sched.step()


def schedule_by_rank(directory: str) -> None:
    """Trains in two launches; each rank has a schedule of its own length."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()

    def launch(leave_after: int | None) -> list[float]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20 + rank)
        checkpointer = Checkpointer(
            Path(directory) / "a",
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
            save_every=3,
            per_rank={"model", "optimizer", "lr_scheduler"},
            transient={"used", "leave_after"},
            agreement_timeout_seconds=10,
        )
        loader = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=1)
        used = []
        for (batch,) in checkpointer.batches(loader, epochs=1):
            used.append(float(scheduler.get_last_lr()[0]))
            model(batch).sum().backward()
            optimizer.step()
            scheduler.step()
            checkpointer.step()
            if checkpointer.progress.step == leave_after:
                break
        checkpointer.close()
        return used

    first, then = launch(6), launch(None)
    assert len(then) == 6
    whole = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(whole, 0.1, total_steps=20 + rank)
    for rate in (*first, *then):
        assert rate == scheduler.get_last_lr()[0]
        whole.step()
        scheduler.step()


def disagree(directory: str, *, about: str) -> None:
    """Trains on two ranks, of which the second was started or written in another way."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    is_odd = torch.distributed.get_rank() == 1
    model = nn.Linear(2, 1)
    where = Path(directory) / ("b" if about in ("directory", "staging") and is_odd else "a")
    if about == "staging" and is_odd:
        where.symlink_to("a")  # the same directory, until this rank sees a copy of it
    options: dict[str, Any] = {"save_every": 4 if about == "option" and is_odd else 3}
    if about == "component" and is_odd:
        options["ema"] = nn.Linear(2, 1)
    checkpointer = Checkpointer(
        where,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        agreement_timeout_seconds=SILENT_SECONDS if about == "silence" else 10,
        **options,
    )
    loader = DataLoader(TensorDataset(torch.randn(12, 2)), batch_size=1)
    epochs = 3 if about == "horizon" and is_odd else 2
    for (batch,) in checkpointer.batches(loader, epochs=epochs):
        model(batch).sum().backward()
        if about == "staging" and is_odd and checkpointer.progress.step == 2:
            where.unlink()
            shutil.copytree(where.with_name("a"), where)
        if about == "replicas" and is_odd and checkpointer.progress.step == 1:
            model.bias.data += 1
        if about == "step" and is_odd and checkpointer.progress.step == 1:
            checkpointer.step()
        checkpointer.step()
        if about == "silence" and is_odd and checkpointer.progress.step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
    checkpointer.close()


def fail_in_two_ways(directory: str) -> None:
    """Each rank has an error of its own class; both must raise that of the first one."""
    torch.distributed.init_process_group("gloo")
    checkpointer = Checkpointer(Path(directory) / "run")
    errors = [SaveError("the disk", found="is full"), SharedDirectoryError("a", found="gone")]

    def fail() -> None:
        raise errors[torch.distributed.get_rank()]

    with pytest.raises(SaveError):
        checkpointer._run.world.everywhere(fail)


def save_by_two_clocks(directory: str, *, seconds: list[float]) -> None:
    """Trains on two ranks, by whose clocks a step takes so many seconds."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    cadence.time = clock  # type: ignore[assignment]
    model = nn.Linear(2, 1)
    checkpointer = Checkpointer(
        Path(directory) / "run",
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        save_every="auto",
        keep_latest=None,
    )
    with checkpointer:
        for (batch,) in checkpointer.batches(
            DataLoader(TensorDataset(torch.randn(6, 2))), epochs=1
        ):
            model(batch).sum().backward()
            clock.now += seconds[torch.distributed.get_rank()]
            checkpointer.step()


def save_and_lose(
    directory: str,
    *,
    name: str = "",
    after_seconds: float = 0.0,
    stopped_seconds: int = 0,
    rank: int = 0,
    async_save: bool = False,
) -> None:
    """Saves after every step; one rank gets a signal so long after the first save.

    Args:
        directory: the run directory.
        name: of the signal; none without it.
        after_seconds: from the first save to the signal.
        stopped_seconds: after which a rank that was stopped continues.
        rank: that gets it.
        async_save: as the option.
    """
    torch.distributed.init_process_group("gloo")
    own_rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Dropout(0.2), nn.Linear(256, 1))
    where = Path(directory) / "run"
    checkpointer = Checkpointer(
        where,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        save_every=1,
        agreement_timeout_seconds=3,
        async_save=async_save,
    )
    loader = DataLoader(TensorDataset(torch.ones(20, 64)), batch_size=1)
    if name and own_rank == rank:
        threading.Thread(
            target=_signal_later, args=(where, name, after_seconds, stopped_seconds), daemon=True
        ).start()
    for (batch,) in checkpointer.batches(loader, epochs=1):
        loss = model(batch).sum()
        loss.backward()
        checkpointer.step(loss=loss)
    checkpointer.close()


class Slow(ComponentState):
    """A state that one rank takes long to give."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def state_dict(self) -> dict[str, float]:
        time.sleep(self.seconds)
        return self.comparable_state()

    def comparable_state(self) -> dict[str, float]:
        return {"seconds": self.seconds}  # of a trace, which the ranks write each for itself

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.seconds = state["seconds"]


def save_slowly(directory: str, *, group_seconds: int) -> None:
    """Trains under DDP; a save takes one rank longer than the training's own group would wait.

    Args:
        directory: the run directory.
        group_seconds: the timeout of the training's process group.
    """
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=group_seconds))
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    seconds = torch.distributed.get_rank() * group_seconds * 1.5
    checkpointer = resumekit.Checkpointer(
        directory,
        components=[
            StateComponent("model", model),
            StateComponent("callbacks/slow", Slow(seconds), SharingPattern.PER_RANK),
        ],
        save_every=2,
    )
    loader = DataLoader(TensorDataset(torch.randn(3, 2)), batch_size=1)
    for (batch,) in checkpointer.batches(loader, epochs=1):
        model(batch).sum().backward()
        checkpointer.step()
    checkpointer.close()


def _signal_later(where: Path, name: str, after_seconds: float, stopped_seconds: int) -> None:
    while not any(where.glob("step-*")):
        time.sleep(0.001)
    time.sleep(after_seconds)
    if name == "SIGSTOP":
        wake = f"sleep {stopped_seconds}; kill -CONT {os.getpid()}"
        subprocess.Popen(["sh", "-c", wake])
    os.kill(os.getpid(), signal.Signals[name])
