"""Starts each launch of a program as a fork of a warm server; SIGKILL ends it after a step.

The program records the loss and a digest of its weights after each step, with the recorder of
``tests/live/shapes``. The step after which a launch dies is its last line.
"""

from __future__ import annotations

import importlib
import os
import signal
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from judge import Launch
from tiny_training import Crash, Recorder, append, show_messages
from torch import nn

from resumekit.errors import ResumekitError
from resumekit.testing.launchers import ForkServer
from resumekit.testing.task import Task, target_of

LAUNCH_SECONDS = 60.0
# Options of an adapter that JSON cannot hold.
SETS = ("transient", "exclude", "allow_missing")


@dataclass(frozen=True)
class KillingRecorder(Recorder):
    """Ends its own process by SIGKILL after so many steps: no exception, no exit handler."""

    def __call__(self, loss: torch.Tensor, model: nn.Module) -> None:
        try:
            super().__call__(loss, model)
        except Crash:
            append(self.path, end="crashed")
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class KilledLaunches:
    """Runs launches for a ``Judge``.

    Args:
        server: the warm server; its modules are imported, and it has no state of a program.
    """

    server: ForkServer

    def __call__(self, directory: Path, given: dict[str, Any], log: Path) -> Launch:
        """What one launch did.

        Args:
            directory: the run directory.
            given: the keyword arguments of ``launch``.
            log: the file for stdout and stderr.
        """
        path = Path(given["path"])
        path.touch()
        environment = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        task = Task(target_of(launch), str(directory), given, environment, str(log))
        if not self.server.run([task], LAUNCH_SECONDS):
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise AssertionError(f"{given['shape']}: a launch did not end: {tail}")
        return Launch.read(path)


def launch(
    directory: str, *, shape: str, path: str, crash_after: int | None, options: dict[str, Any]
) -> None:
    """One launch of a program, in a process of its own.

    Args:
        directory: the run directory.
        shape: ``module:function``.
        path: the file of this launch.
        crash_after: the number of steps after which it is killed; None lets it finish.
        options: of the Checkpointer or the callback.
    """
    show_messages(path)
    torch.set_num_threads(1)
    module, _, name = shape.partition(":")
    given = {key: set(each) if key in SETS else each for key, each in options.items()}
    try:
        train = getattr(importlib.import_module(module), name)
        train(directory, record=KillingRecorder(path, crash_after), **given)
    except ResumekitError as error:
        append(path, end="refused", error=f"{type(error).__name__}: {error}")
    except BaseException:  # noqa: BLE001 - recorded for the judge, whatever it is
        append(path, end="failed", error=traceback.format_exc())
    else:
        append(path, end="finished")
