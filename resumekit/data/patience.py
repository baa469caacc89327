"""Tells how something that takes long gets on."""

from __future__ import annotations

import sys
import time

import torch.distributed as dist

from resumekit.log import logger

_FIRST_SECONDS = 1.0


class Patience:
    """Says on standard error how far a count is, once it has taken longer than a second.

    On a terminal one line is written again every second; elsewhere a line follows whenever the time
    has doubled. Rank 0 only.

    Args:
        what: what is being done, e.g. ``"drawing through the used batches again"``.
        total: how many there are.
    """

    def __init__(self, what: str, total: int) -> None:
        self._what = what
        self._total = total
        self._began = time.monotonic()
        self._next_seconds = _FIRST_SECONDS
        self._told = False

    def at(self, count: int) -> None:
        """So many are done."""
        seconds = time.monotonic() - self._began
        if seconds < self._next_seconds:
            return
        left = seconds / count * (self._total - count)
        share = f"{count} of {self._total} ({100 * count // self._total}%)"
        self._tell(f"{self._what}: {share}, about {left:.0f} s left")
        self._next_seconds = seconds + 1 if sys.stderr.isatty() else 2 * seconds

    def done(self) -> None:
        """All are done."""
        if self._told:
            seconds = time.monotonic() - self._began
            self._tell(f"{self._what}: {self._total}, {seconds:.0f} s", last=True)

    def _tell(self, message: str, *, last: bool = False) -> None:
        self._told = True
        if _rank() == 0:
            terminal = sys.stderr.isatty()
            begin, end = ("\r\033[K", "\n" if last else "") if terminal else ("", "\n")
            sys.stderr.write(f"{begin}resumekit: {message}{end}")
            sys.stderr.flush()


def warn(message: str) -> None:
    """A warning about this rank's own data."""
    on_rank = f"rank {_rank()}: " if _num_ranks() > 1 else ""
    logger.warning("%s%s", on_rank, message)


def _rank() -> int:
    return dist.get_rank() if _num_ranks() > 1 else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
