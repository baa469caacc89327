"""Data on a machine that fails once: the process is killed when it reads a certain sample.

``KILL_AT_READ`` gives the number of the read, and ``KILL_ONCE`` the file that is made then, so that
the next launch lives. ``READ_SECONDS`` makes each read slow. Without the variables nothing happens.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

_reads = itertools.count(1)


class Samples(torch.utils.data.Dataset[Any]):
    """A data set that hands out the rows of a list."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        marker = os.environ.get("KILL_ONCE")
        is_due = marker is not None and next(_reads) == int(os.environ["KILL_AT_READ"])
        if marker is not None and is_due and not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(os.environ.get("READ_SECONDS", "0")))
        return self.rows[index]
