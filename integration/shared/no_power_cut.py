"""Turns fsync off in the warm servers and all that they fork: no test here cuts the power.

What is synced, and in which order, is tested on recorded file systems; what is killed here leaves
its writes to the kernel. A cold start, a script and a benchmark sync as usual.
"""

from __future__ import annotations

import os


def _keep_in_memory(fd: object) -> None:
    """Leaves the writes of a file to the kernel."""


os.fsync = _keep_in_memory
