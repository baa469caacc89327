"""Training that is killed, that ends or that forks while a save is written in the background."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import train

from resumekit.adapters.torch import Checkpointer
from resumekit.storage import store
from resumekit.storage.io.file_system import LocalFileSystem

_POLL_SECONDS = 0.0005
STATE_BYTES = 128 << 20


def train_until_killed(
    directory: str, *, options: dict[str, Any], after_seconds: float | None = None, rank: int = 0
) -> None:
    """The training of ``workloads``; a rank is killed so long after a save in the background began.

    Args:
        directory: the run directory.
        options: of that training.
        after_seconds: from the beginning of a later save than the first to SIGKILL for the whole
            process group of the rank; None for no kill.
        rank: that is killed.
    """
    if after_seconds is not None and int(os.environ.get("RANK", "0")) == rank:
        arguments = (Path(directory), after_seconds)
        threading.Thread(target=_kill, args=arguments, daemon=True).start()
    train(directory, async_save=True, **options)


def _kill(where: Path, after_seconds: float) -> None:
    while not any(where.glob("step-*/manifest.json")):
        time.sleep(_POLL_SECONDS)
    while not any(where.glob(".staging/step-*")):
        time.sleep(_POLL_SECONDS)
    time.sleep(after_seconds)
    os.killpg(os.getpgrp(), signal.SIGKILL)


class SlowFileSystem(LocalFileSystem):
    """Takes long for the files that the background thread writes."""

    def fsync(self, handle: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.2)
        super().fsync(handle)


def leave_by(directory: str, *, how: str) -> None:
    """Trains four steps, and ends while the save of step 3 is written.

    Args:
        directory: the run directory.
        how: ``"return"``, ``"del"``, ``"sys.exit"``, ``"exception"`` or ``"close"``.
    """
    store.LocalFileSystem = SlowFileSystem  # type: ignore[misc]
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        save_every=3,
        async_save=True,
        agreement_timeout_seconds=20,
    )
    loader = DataLoader(TensorDataset(torch.ones(20, 64)), batch_size=1)
    for (batch,) in checkpointer.batches(loader, epochs=1):
        model(batch).sum().backward()
        checkpointer.step()
        if checkpointer.progress.step == 4:
            break
    assert not list(Path(directory).glob("step-*")), "it was written too early to test anything"
    if how == "close":
        checkpointer.close()
    elif how == "sys.exit":
        sys.exit(3)
    elif how == "exception":
        raise ZeroDivisionError
    elif how == "del":
        del checkpointer


def fork_workers(directory: str, *, num_rounds: int) -> None:
    """Starts four workers in each round, while a save of 128 MB is written in the background.

    Args:
        directory: the run directory.
        num_rounds: how often.
    """
    model = nn.Linear(1, 1)
    extras = {"state": torch.zeros(STATE_BYTES // 4)}
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        extras=extras,
        async_save=True,
        keep_latest=1,
    )
    data = TensorDataset(torch.arange(8.0)[:, None])
    most = in_flight = 0
    for number in range(num_rounds):
        faulthandler.dump_traceback_later(60, exit=True)  # a round that hangs ends with this
        extras["state"].fill_(number)
        checkpointer.save()
        in_flight += bool(list(Path(directory).glob(".staging/step-*")))
        workers = iter(DataLoader(data, batch_size=2, num_workers=4))
        assert len(list(workers)) == 4
        most = max(most, *map(_private_bytes, _children()), 0)
        del workers
    faulthandler.cancel_dump_traceback_later()
    checkpointer.close()
    assert most < STATE_BYTES // 2, f"a worker has {most / 1e6:.0f} MB of its own"
    assert in_flight >= num_rounds // 2, f"{in_flight} of {num_rounds} saves were in flight"


def _children() -> list[int]:
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()]


def _private_bytes(pid: int) -> int:
    """The memory that a process shares with no other."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))
