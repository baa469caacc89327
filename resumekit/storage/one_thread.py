"""Refuses a second thread that changes a run directory while one is at it."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path

from resumekit.errors import LoopError


class OneThread(AbstractContextManager[None]):
    """A body that two threads cannot be in; the second one gets an error.

    It is never waited for, so a process that was forked meanwhile cannot hang on it.

    Args:
        directory: the run directory, for the message.

    Raises:
        LoopError: at the start of the body, when another thread is in it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise LoopError(
                str(self._directory),
                found="another thread is changing it",
                expected="one at a time",
                remedy="Call wait() before",
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()
