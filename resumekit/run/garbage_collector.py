"""Pauses Python's garbage collector while many objects are made that stay for a moment.

A state of 10,000 tensors makes 100,000 objects and more. For each hundred thousand of them Python
looks at every object of the process once, of which ``import torch`` leaves 400,000: that took as
long as the save itself. What a save leaves behind goes by reference counts.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_is_paused = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection begins in the body, in any thread; a disabled collector stays disabled.

    It is enabled in a process that is forked in the body, such as a worker of a loader.
    """
    global _is_paused
    if not gc.isenabled():
        yield
        return
    gc.disable()
    _is_paused = True
    try:
        yield
    finally:
        _is_paused = False
        gc.enable()


def _enable_in_child() -> None:
    if _is_paused:
        gc.enable()


os.register_at_fork(after_in_child=_enable_in_child)
