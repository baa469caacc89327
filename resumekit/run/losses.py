"""Reading the loss of a step without waiting for the device that computes it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

# Losses that no record holds yet; beyond that the oldest ones are given up.
MAX_WAITING = 256


def plain_loss(loss: Any) -> float | None:
    """The loss as a number; None where a device has still to compute it or it is no number."""
    if type(loss) is torch.Tensor:  # a DTensor's item() is a collective
        if not loss.is_cpu or loss.numel() != 1 or loss.is_complex():
            return None
        return float(loss.item())
    try:
        return None if isinstance(loss, torch.Tensor) else float(loss)
    except (TypeError, ValueError, OverflowError):
        return None


class LateLosses:
    """Losses on CUDA devices, copied to the host without blocking.

    The copy is queued in the stream of the step, so a tensor that changes later, such as a running
    sum, is read as it was.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, torch.Tensor, Any]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, step: int, loss: Any) -> None:
        """Takes the loss of a step, if it is a number on a CUDA device."""
        if type(loss) is not torch.Tensor or loss.device.type != "cuda" or loss.numel() != 1:
            return
        host = torch.empty((), dtype=loss.dtype, pin_memory=True)
        host.copy_(loss.detach().reshape(()), non_blocking=True)
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch 2.13
        event.record(torch.cuda.current_stream(loss.device))
        self._waiting.append((step, host, event))
        if len(self._waiting) > MAX_WAITING:
            self._waiting.popleft()

    def computed(self) -> list[tuple[int, float]]:
        """The steps and losses that have arrived since the last call, in their order."""
        found = []
        while self._waiting and self._waiting[0][2].query():
            step, host, _ = self._waiting.popleft()
            found.append((step, float(host)))
        return found

    def waits_for(self, step: int) -> bool:
        """Whether the loss of a step up to this one has not arrived."""
        return bool(self._waiting) and self._waiting[0][0] <= step

    def wait(self) -> None:
        """Returns when all have arrived."""
        if self._waiting:
            self._waiting[-1][2].synchronize()
