"""Pauses Python's garbage collector while many objects are made that stay for a moment.

A state of 10,000 tensors makes 100,000 objects and more. For each hundred thousand of them Python
looks at every object of the process once, of which ``import torch`` leaves 400,000: that took as
long as the save itself. What a save leaves behind goes by reference counts.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """No collection begins in the body, in any thread; a disabled collector stays disabled."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
