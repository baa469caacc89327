"""The lock that keeps two live jobs out of one run directory, and ends with its process.

It is a POSIX record lock (``fcntl.lockf``), which belongs to a process. A ``flock`` belongs to an
open file that forked children share: data loader workers that outlive a killed trainer would keep
it. Two properties of record locks need care:

- the process that holds one is never refused it again, so this process's own are kept in a table;
- closing *any* descriptor of the file drops the lock, so it is never opened a second time. Where
  that happens all the same (a job that copies its own run directory), the owner record still keeps
  the elder of two jobs from committing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

POLL_SECONDS = 0.05


class DirectoryLock(Protocol):
    """What excludes other jobs from a run directory."""

    def acquire(self, path: Path) -> bool:
        """Whether the lock file at this path, in an existing directory, is now ours."""
        ...

    def release(self) -> None:
        """Lets others in; without effect when nothing is held."""
        ...


class NoLock:
    """Excludes nobody: for file systems that live in memory."""

    def acquire(self, path: Path) -> bool:
        """Always true."""
        return True

    def release(self) -> None:
        """Nothing to do."""


# Directories locked by this process, as (pid, device, inode). It has to be one table for the whole
# process because the locks are. With the pid in it, a forked child does not take itself for the
# owner. Only setdefault and pop touch it: both are atomic.
_held: dict[tuple[int, int, int], object] = {}


class PosixLock:
    """A record lock on one file.

    Args:
        wait_seconds: how long to wait for a holder. A killed process keeps its locks until all its
            memory is given back, which takes seconds for a large one.
    """

    def __init__(self, *, wait_seconds: float = 5.0) -> None:
        self._wait_seconds = wait_seconds
        self._give_back: Callable[[], object] | None = None

    def acquire(self, path: Path) -> bool:
        """Whether the lock is now held; waits for a holder that is about to end.

        Raises:
            OSError: the file cannot be made here, or the file system has no locks.
        """
        status = os.stat(path.parent)
        key = (os.getpid(), status.st_dev, status.st_ino)
        token = object()
        if _held.setdefault(key, token) is not token:
            return False
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError:
            _held.pop(key, None)
            raise
        # Also when the owner is dropped without release(): nobody could use the lock any more.
        give_back = weakref.finalize(self, _give_back, descriptor, key)
        give_back.atexit = False
        try:
            locked = self._wait(descriptor)
        except OSError:
            give_back()
            raise
        if locked:
            self._give_back = give_back
        else:
            give_back()
        return locked

    def release(self) -> None:
        """Lets others in; without effect when nothing is held."""
        if self._give_back is not None:
            self._give_back()

    def _wait(self, descriptor: int) -> bool:
        deadline = time.monotonic() + self._wait_seconds
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            else:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)


def _give_back(descriptor: int, key: tuple[int, int, int]) -> None:
    _held.pop(key, None)
    os.close(descriptor)
