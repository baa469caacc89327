"""Kills the script of a Start page between two checkpoints."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil


def start(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    """A process whose stdout has both streams."""
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def kill(process: subprocess.Popen[str], folder: Path) -> str:
    """Kills all its processes between steps 300 and 400, of which 300 is saved; what it printed."""
    seconds = []
    for step in (200, 300):
        while not (folder / "runs" / "a" / f"step-{step:08}").exists():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.005)
        seconds.append(time.monotonic())
    time.sleep((seconds[1] - seconds[0]) / 4)
    leader = psutil.Process(process.pid)
    for each in [*leader.children(recursive=True), leader]:
        each.kill()
    return process.communicate()[0]
