"""What the shapes share: a tiny model with its data, one step of it, and the launch of a shape.

A shape is a function ``train(directory, *, record, **options)`` whose own variable decides how it
trains. Nothing in this file may keep state: it would be a part of every shape.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import random
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from resumekit.errors import ResumekitError

EPOCHS, BATCHES, BATCH_SIZE = 3, 7, 4


class Parts(NamedTuple):
    """What every shape trains with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]


def make(*, lr: float = 0.05) -> Parts:
    """A seeded model with dropout, SGD with momentum, and a loader that shuffles.

    On several ranks the model is a DDP one, and each rank has its own data and dropout.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    data = TensorDataset(*torch.randn(2, num_ranks * BATCHES * BATCH_SIZE, 4))
    if num_ranks == 1:
        loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    else:
        torch.distributed.init_process_group("gloo")
        model = DistributedDataParallel(model)
        torch.manual_seed(int(os.environ["RANK"]))
        loader = DataLoader(data, batch_size=BATCH_SIZE, sampler=DistributedSampler(data))
    return Parts(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), loader)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The mean squared error of a batch."""
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets[:, :1])


def step(ckpt: Any, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """One optimizer step, counted by the Checkpointer."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ckpt.step(loss=loss)


class Crash(BaseException):
    """The failure of a launch at the end of a step; no ``except Exception`` of a shape takes it."""


@dataclass(frozen=True)
class Recorder:
    """Appends the loss and the digest of the weights; raises ``Crash`` after so many steps.

    It counts by the file: an object that counts would be state of the training itself.

    Args:
        path: the file of this launch.
        crash_after: the number of its steps; None never raises.
        waits: wait there for SIGKILL instead.
    """

    path: str
    crash_after: int | None
    waits: bool = False

    def __call__(self, loss: torch.Tensor, model: nn.Module) -> None:
        sha = hashlib.sha256()
        for value in model.state_dict().values():
            sha.update(value.numpy().tobytes())
        append(self.path, step=[float(loss).hex(), sha.hexdigest()[:16]])
        with open(self.path, encoding="utf-8") as file:
            num_steps = sum(line.startswith('{"step"') for line in file)
        if num_steps == self.crash_after:
            while self.waits:
                time.sleep(1.0)
            raise Crash


def append(path: str, **line: Any) -> None:
    """Appends one line to the file of a launch."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(f"{json.dumps(line)}\n")


class MessageLines(logging.Handler):
    """Appends what the library logs to the file of a launch, between the steps."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        append(self._path, level=record.levelname, message=record.getMessage())


def show_messages(path: str) -> None:
    """Appends what the library logs to the file of this launch."""
    logger = logging.getLogger("resumekit")
    logger.addHandler(MessageLines(path))
    logger.setLevel(logging.INFO)
    logger.propagate = False


def launch(
    directory: str,
    *,
    shape: str,
    path: str,
    crash_after: int | None,
    options: Mapping[str, Any],
) -> None:
    """One launch of a shape, in a process of its own; writes all that it did to a file.

    Args:
        directory: the run directory.
        shape: ``module:function``.
        path: the file.
        crash_after: the number of steps after which it crashes; None lets it finish.
        options: of the Checkpointer.
    """
    show_messages(path)
    module, _, name = shape.partition(":")
    try:
        train = getattr(importlib.import_module(module), name)
        train(directory, record=Recorder(path, crash_after), **options)
    except Crash:
        append(path, end="crashed")
        os._exit(0)  # a crashed process runs no exit handlers of a finished training
    except ResumekitError as error:
        append(path, end="refused", error=f"{type(error).__name__}: {error}")
        os._exit(0)
    except BaseException:  # noqa: BLE001 - recorded for the judge, whatever it is
        append(path, end="failed", error=traceback.format_exc())
        os._exit(0)
    append(path, end="finished")


def begin_script() -> dict[str, Any]:
    """The arguments of ``launch`` from the command line of a script, which SIGKILL ends.

    What the library logs, and the exception that ends the script, are appended to the file of the
    launch. Of several ranks, each writes its own; ``record`` is the shape's.
    """
    given = json.loads(sys.argv[1])
    path = given["path"] + os.environ.get("RANK", "")
    show_messages(path)
    show_traceback = sys.excepthook

    def append_error(kind: type[BaseException], error: BaseException, at: Any) -> None:
        end = "refused" if isinstance(error, ResumekitError) else "failed"
        append(path, end=end, error=f"{kind.__name__}: {error}")
        show_traceback(kind, error, at)

    sys.excepthook = append_error
    return {**given, "path": path, "record": Recorder(path, given["crash_after"], waits=True)}


def run_as_script(functions: Mapping[str, Any]) -> None:
    """One launch of a shape whose file is ``__main__``.

    Args:
        functions: the globals of the script.
    """
    given = begin_script()
    train = functions[given["shape"].partition(":")[2]]
    train(given["directory"], record=given["record"], **given["options"])
    append(given["path"], end="finished")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
