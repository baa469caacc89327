"""Starts each launch of a shape as a script of its own, on one rank or several, and SIGKILLs it."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any

from judge import FOLDER, Launch, environment

from resumekit.launcher.processes import Launch as Processes
from resumekit.testing.launchers import free_port

MARKER = "SHAPE_LAUNCH"
LAUNCH_SECONDS = 120.0
POLL_SECONDS = 0.02


class ColdLaunches:
    """Starts each launch as a script of its own; every process of it is killed together.

    Args:
        script: the file that runs; the one of the shape without it.
        num_ranks: of torchrun; 1 starts the script alone.
    """

    def __init__(self, script: Path | None = None, *, num_ranks: int = 1) -> None:
        self._script = script
        self._num_ranks = num_ranks

    def __call__(self, directory: Path, given: dict[str, Any], log: Path) -> Launch:
        """What one launch did; the steps of several ranks are joined."""
        script = self._script or FOLDER / f"{given['shape'].partition(':')[0]}.py"
        paths = [Path(f"{given['path']}{rank}") for rank in self._ranks()]
        for path in paths:
            path.touch()
        command = [sys.executable, *self._torchrun(), str(script)]
        command.append(json.dumps({**given, "directory": str(directory)}))
        processes = Processes(command, {**environment(), MARKER: str(log)}, marker=MARKER, log=log)
        crash_after, launches = given["crash_after"], []
        deadline = time.monotonic() + LAUNCH_SECONDS
        try:
            while time.monotonic() < deadline:
                status = processes.poll()
                launches = [Launch.read(path) for path in paths]
                if status is not None:
                    return _joined(launches, processes.log_tail())
                if crash_after and all(len(each.steps) == crash_after for each in launches):
                    launches = [
                        dataclasses.replace(each, end="crashed", error="") for each in launches
                    ]
                    return _joined(launches, "")
                time.sleep(POLL_SECONDS)
        finally:
            processes.kill_all()
        raise AssertionError(f"{given['shape']}: a launch did not end: {processes.log_tail()}")

    def _ranks(self) -> list[str]:
        return [""] if self._num_ranks == 1 else [str(rank) for rank in range(self._num_ranks)]

    def _torchrun(self) -> list[str]:
        if self._num_ranks == 1:
            return []
        module = ["-m", "torch.distributed.run"]
        return [*module, f"--nproc-per-node={self._num_ranks}", f"--master-port={free_port()}"]


def _joined(launches: list[Launch], log: str) -> Launch:
    """The launch of all ranks: one that ended by an error decides, or else the first."""
    ended = [each for each in launches if each.end == "refused"]
    ended += [each for each in launches if each.end == "failed"]
    decisive = (ended or launches)[0]
    steps = zip(*(each.steps for each in launches), strict=False)
    return dataclasses.replace(
        decisive,
        steps=tuple(tuple(chain(*each)) for each in steps),
        warnings=tuple(warning for each in launches for warning in each.warnings),
        error=decisive.error + (log if decisive.end == "failed" else ""),
    )
