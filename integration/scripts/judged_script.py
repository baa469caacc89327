"""What the judged scripts share: their arguments, and the record that they write of each step."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

# Set by integration/user_scripts/script_judge.py. Without the first one nothing is recorded.
RECORDS_VARIABLE = "SCRIPT_RECORDS"
WAIT_VARIABLE = "SCRIPT_WAITS_AT"


def arguments(*names: str) -> argparse.Namespace:
    """The arguments of a script: directory, ``--strict``, ``--loop-variables``, ``--bare``, others.

    ``--bare`` adds nothing to the script but the Checkpointer.

    Args:
        *names: options that take a string, without dashes.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--loop-variables", default="restore")
    for name in names:
        parser.add_argument(f"--{name}", default="")
    return parser.parse_args()


def record(
    step: int,
    *,
    loss: Any,
    optimizers: Any = (),
    inputs: Any = None,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Appends what this step did to the records of this rank; waits for SIGKILL at the last one.

    Nothing of it comes from resumekit: a judge compares the records of two runs.

    Args:
        step: the number of the step, from 1.
        loss: a tensor or a number.
        optimizers: one or several; every tensor of every param group and state is digested.
        inputs: what the step was computed from.
        state: everything else that decides later steps, by name.
    """
    path = os.environ.get(RECORDS_VARIABLE)
    if path is None:
        return
    several = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    line = {
        "step": int(step),
        "loss": float(loss.detach() if isinstance(loss, torch.Tensor) else loss).hex(),
        "trained": digest([_content_of(optimizer) for optimizer in several]),
        "inputs": digest(inputs),
        **{name: digest(value) for name, value in (state or {}).items()},
    }
    with open(f"{path}-rank-{os.environ.get('RANK', '0')}.jsonl", "a", encoding="utf-8") as file:
        file.write(f"{json.dumps(line)}\n")
    while int(step) == int(os.environ.get(WAIT_VARIABLE, "-1")):
        time.sleep(1.0)


def digest(value: Any) -> str:
    """A sha256 of nested plain values, tensors and arrays; an object counts by its attributes."""
    sha = hashlib.sha256()
    for part in _parts_of(value):
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.hexdigest()[:24]


def _content_of(optimizer: Any) -> list[Any]:
    """The parameters of each group, their state, and the numbers of the group."""
    content: list[Any] = []
    for group in optimizer.param_groups:
        plain = {k: v for k, v in group.items() if isinstance(v, (bool, int, float))}
        content.append(plain)
        content.extend([p.detach(), optimizer.state.get(p, {})] for p in group["params"])
    return content


def _parts_of(value: Any) -> Iterable[bytes]:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        plain = local.detach().cpu().contiguous()
        yield f"tensor {plain.dtype} {tuple(plain.shape)}".encode()
        yield plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, torch.Generator):
        yield from _parts_of(value.get_state())
    elif isinstance(value, np.random.Generator):
        yield from _parts_of(value.bit_generator.state)
    elif isinstance(value, float):
        yield value.hex().encode()
    elif value is None or isinstance(value, (bool, int, str, np.generic)):
        yield f"{value}".encode()
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield f"key {name}".encode()
            yield from _parts_of(each)
    elif isinstance(value, Iterable):
        yield b"sequence"
        for each in value:
            yield from _parts_of(each)
    else:
        yield f"object {type(value).__name__}".encode()
        yield from _parts_of(vars(value))
