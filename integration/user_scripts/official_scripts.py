"""The scripts of ``official/``, how they are launched, and what they write themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

TRAINER = "trainer_classification.py"
LIGHTNING = "lightning_digits.py"

MODULE = (sys.executable, "-m")
TORCHRUN = (*MODULE, "torch.distributed.run", "--standalone", "--nproc-per-node=2")
ACCELERATE = (
    *(*MODULE, "accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1"),
    *("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"),
)


def output_of(command: Sequence[str], environment: Mapping[str, str], expected: int = 0) -> str:
    """What a command writes, after it has ended with this status."""
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == expected, done.stdout[-3000:]
    return done.stdout


def results_of(directory: Path) -> dict[str, Any]:
    """Losses and weights, from the files of a script.

    Args:
        directory: its ``--output_dir``.
    """
    if (directory / "losses.jsonl").is_file():
        lines = (directory / "losses.jsonl").read_text().splitlines()
        losses = dict(json.loads(line) for line in lines)  # of repeated steps, the last ones
    else:
        log = json.loads((directory / "trainer_state.json").read_text())["log_history"]
        losses = {each["step"]: each["loss"] for each in log if "loss" in each}
    files = sorted([*directory.glob("*.pt"), *directory.glob("*.safetensors")])
    return {"losses": losses, **{path.name: contents_of(path) for path in files}}


def contents_of(path: Path) -> Any:
    """The bytes of the tensors in a file."""
    if path.suffix == ".safetensors":
        return path.read_bytes()
    state = torch.load(path, weights_only=True)
    return {name: value.numpy().tobytes() for name, value in state.items()}
