"""What a training on a GPU leaves for its judge, ``python -m resumekit.testing.gpu``."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STEPS_PER_EPOCH, NUM_EPOCHS, SAVE_EVERY = 8, 3, 5
NUM_STEPS = STEPS_PER_EPOCH * NUM_EPOCHS


class Evidence:
    """What one launch leaves for the judge: lines of step, name and value.

    Args:
        path: of the file, to which lines are appended.
        kill: the step after which this process kills itself; 0 for never.
        is_deferred: keep copies on the device until the end, so that the loop never waits for it.
    """

    def __init__(self, path: Path, *, kill: int = 0, is_deferred: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._kill, self._is_deferred = path, kill, is_deferred
        self._lines: list[tuple[int, str, Tensor | str]] = []

    def begin(self, step: int, tensors: Mapping[str, Any]) -> None:
        """Adds the state with which this launch begins, when it is called for the first time."""
        if not self._lines and not self._path.exists():
            self._add(step, tensors)

    def end_step(self, step: int, loss: Tensor, tensors: Mapping[str, Any]) -> None:
        """Adds a loss, and the state where it is saved; kills the process after its last step."""
        self._lines.append((step, "loss", loss.detach().clone()))
        if step % SAVE_EVERY == 0 or step == NUM_STEPS:
            self._add(step, tensors)
        if not self._is_deferred or step in (self._kill, NUM_STEPS):
            with self._path.open("a") as file:
                file.writelines(f"{at}\t{name}\t{_text(it)}\n" for at, name, it in self._lines)
            self._lines.clear()
        if step == self._kill:
            os.kill(os.getpid(), signal.SIGKILL)

    def _add(self, step: int, tensors: Mapping[str, Any]) -> None:
        """Copies the tensors in the order of the current stream."""
        for name, value in tensors.items():
            local: Any = value.to_local() if hasattr(value, "to_local") else value
            copy = local if isinstance(local, str) else local.detach().clone()
            self._lines.append((step, name, copy))


def _text(value: Tensor | str) -> str:
    if isinstance(value, str):
        return value
    if value.dim() == 0 and value.is_floating_point():
        return float(value).hex()
    whole = value.resolve_conj().resolve_neg().cpu().contiguous()
    digest = hashlib.sha256(whole.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
    return f"{value.dtype} {tuple(value.shape)} {digest}"
