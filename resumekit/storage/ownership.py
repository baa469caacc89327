"""Exclusive use of a run directory: by one job, and in it by one thread that changes it.

The lock is a POSIX record lock (``fcntl.lockf``): it belongs to a process. A ``flock`` belongs to
an open file that forked children share, so data loader workers that outlive a killed trainer
would keep it. Two properties of record locks need care:

- the process that holds one is never refused it again, so a table keeps this process's locks;
- closing *any* descriptor of the file drops the lock, so it is never opened a second time. Where
  that happens all the same (a job that copies its run directory), the owner record still keeps the
  older of two jobs from committing.

The owner record names the run, its current attempt and the process, and carries the run's id from
one attempt to the next. A commit reads it again, so a rank that outlived its job cannot commit.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

from resumekit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DirectoryError,
    FormatVersionError,
    LoopError,
    OwnershipLostError,
    UnreadableCheckpointError,
)
from resumekit.storage.committed import list_steps
from resumekit.storage.directories import (
    LATEST,
    LOCK,
    OWNER,
    QUARANTINE,
    STAGING,
    TRAININGS,
    StepName,
    name_few,
    read_small,
    replace_small,
    seal,
    unseal,
)
from resumekit.storage.io.file_system import FileSystem
from resumekit.storage.manifest import HEX, check_fields, count, read_manifest, text


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


# ---------------------------------------------------------------- one job

POLL_SECONDS = 0.05


class DirectoryLock(Protocol):
    """Excludes other jobs from a run directory."""

    def acquire(self, path: Path) -> bool:
        """Whether this object now holds the lock file at this path, in an existing directory."""
        ...

    def release(self) -> None:
        """Releases the lock, if it is held."""
        ...


# Directories locked by this process, as (pid, device, inode): one table, as record locks belong to
# the process. The pid keeps a forked child from appearing as the owner. Only setdefault and pop,
# which are atomic, change it.
_locked: dict[tuple[int, int, int], object] = {}


class NoLock:
    """Excludes no other job; the owner record alone keeps the older one from committing."""

    def acquire(self, path: Path) -> bool:
        return True

    def release(self) -> None:
        pass


class PosixLock:
    """A record lock on one file.

    Args:
        wait_seconds: how long to wait for another holder. A killed process keeps its locks
            until its memory is freed, which takes seconds for a large one.
    """

    def __init__(self, *, wait_seconds: float = 5.0) -> None:
        self._wait_seconds = wait_seconds
        self._unlock: Callable[[], object] | None = None

    def acquire(self, path: Path) -> bool:
        """Whether the lock is now held; waits for another holder to end.

        Raises:
            OSError: the file cannot be created here, or the file system has no locks.
        """
        status = os.stat(path.parent)
        key = (os.getpid(), status.st_dev, status.st_ino)
        token = object()
        if _locked.setdefault(key, token) is not token:
            gc.collect()  # it may belong to a run that the user deleted, kept by cycles alone
            if _locked.setdefault(key, token) is not token:
                return False
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        except OSError:
            _locked.pop(key, None)
            raise
        # Also when this object is garbage-collected without release().
        unlock = weakref.finalize(self, _unlock, descriptor, key)
        unlock.atexit = False
        try:
            locked = self._wait(descriptor)
        except OSError:
            unlock()
            raise
        if locked:
            self._unlock = unlock
        else:
            unlock()
        return locked

    def release(self) -> None:
        """Releases the lock, if it is held."""
        if self._unlock is not None:
            self._unlock()

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


def _unlock(descriptor: int, key: tuple[int, int, int]) -> None:
    _locked.pop(key, None)
    os.close(descriptor)


_MAX_BYTES = 64 << 10
# The errors of open for a name that is no regular file: a link, a directory or a pipe.
_NOT_A_FILE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO)


@dataclass(frozen=True)
class Owner:
    """The run, attempt and process that use a run directory.

    Args:
        run_id: of the run, kept over all its attempts; 32 hexadecimal digits.
        attempt: of this process start; 32 hexadecimal digits.
        host: its node's name.
        pid: its process on that node.
        started: ISO 8601 in UTC, for people.
    """

    run_id: str
    attempt: str
    host: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls, run_id: str | None = None, attempt: str | None = None) -> Owner:
        """An attempt of this process; without ids a new attempt, of a new run."""
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        run_id, attempt = run_id or uuid.uuid4().hex, attempt or uuid.uuid4().hex
        return cls(run_id, attempt, socket.gethostname(), os.getpid(), started)

    def to_bytes(self) -> bytes:
        """The record file."""
        return seal(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Owner:
        """The record of a file.

        Raises:
            CorruptCheckpointError: it is damaged.
        """
        content = unseal(data, where=OWNER)
        check_fields(content, _CHECKS, where=OWNER)
        return cls(**content)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"


_CHECKS = {"run_id": HEX, "attempt": HEX, "host": text, "pid": count(), "started": text}


def load_owner(file_system: FileSystem, directory: Path) -> Owner:
    """The record in a run directory.

    Raises:
        CorruptCheckpointError: it is damaged.
        OSError: it could not be read, or is no regular file.
    """
    data = read_small(file_system, directory / OWNER, where=OWNER, max_bytes=_MAX_BYTES)
    return Owner.from_bytes(data)


def read_owner(file_system: FileSystem, directory: Path) -> Owner | None:
    """The record in a run directory; None where there is none, or only a damaged one.

    Raises:
        OSError: it could not be read.
    """
    try:
        return load_owner(file_system, directory)
    except CorruptCheckpointError:
        return None
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            return None
        raise


def find_run_id(file_system: FileSystem, directory: Path) -> str | None:
    """The id of the run that uses a directory; None for no run.

    From the record, or without one from the newest manifest that verifies.

    Raises:
        OSError: neither could be read.
        CheckpointError: the same, or a newer version of resumekit wrote the checkpoints.
    """
    unsure: CheckpointError | OSError | None = None
    try:
        previous = read_owner(file_system, directory)
        if previous is not None:
            return previous.run_id
    except OSError as error:
        unsure = error
    for name in list_steps(file_system, directory):
        try:
            return read_manifest(file_system, directory, name).run_id
        except CorruptCheckpointError:
            continue
        except (FormatVersionError, UnreadableCheckpointError) as error:
            unsure = unsure or error
    if unsure is not None:
        # With a new id the existing checkpoints would belong to another run.
        raise unsure
    return None


def write_owner(file_system: FileSystem, directory: Path, owner: Owner) -> None:
    """Replaces the record atomically and durably; a kill leaves the old one or the new one.

    Raises:
        OSError: as the failing call said.
    """
    draft = directory / STAGING / f"owner-{owner.attempt}"
    replace_small(file_system, directory / OWNER, owner.to_bytes(), draft=draft)
    file_system.fsync_dir(directory)


def check_owner(file_system: FileSystem, directory: Path, owner: Owner) -> None:
    """Checks that this attempt still owns the directory.

    Raises:
        OwnershipLostError: the record names another one, or is gone.
        OSError: it could not be read.
    """
    found = read_owner(file_system, directory)
    if found is None or found.attempt != owner.attempt:
        raise OwnershipLostError(
            str(directory / OWNER),
            found="is missing or damaged" if found is None else f"names {found}",
            expected=f"this attempt: {owner}",
            remedy="Let only one job use the directory, and start this one again",
        )


def is_unused(file_system: FileSystem, directory: Path) -> bool:
    """Whether a directory is missing, or holds at most what ``Store.acquire`` makes.

    Raises:
        OSError: it could not be listed.
    """
    try:
        entries = file_system.list(directory)
    except FileNotFoundError:
        return True
    return {entry.name for entry in entries} <= {OWNER, LOCK, STAGING, TRAININGS}


_OF_A_RUN = frozenset({OWNER, LOCK, STAGING, QUARANTINE, TRAININGS})


def unrelated_names(file_system: FileSystem, directory: Path) -> str:
    """A few of the names in a directory that no run has used; empty for a run directory.

    Raises:
        DirectoryError: they are checkpoints of another program, which has a ``latest`` file too.
        OSError: the directory could not be listed.
    """
    entries = {entry.name: entry.kind for entry in file_system.list(directory)}
    if any(name in _OF_A_RUN or StepName.parse(name) is not None for name in entries):
        return ""
    words = name_few(sorted(entries))
    if entries.get(LATEST) == "file":
        raise DirectoryError(
            str(directory),
            found=f"no run, but the checkpoints of something else ({words})",
            expected="an empty directory, or that of a run",
            remedy="Give the run a directory of its own",
        )
    return words
