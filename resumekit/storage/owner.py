"""The record of who works in a run directory: the run, its present attempt, and the process.

The lock says whether somebody is at work; the record says who, and carries the run's id from one
attempt to the next. A commit reads it again, so that a rank that outlived its job cannot commit.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import uuid
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

from resumekit.errors import (
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    OwnershipLostError,
    UnreadableCheckpointError,
)
from resumekit.storage.io import FileSystem
from resumekit.storage.names import OWNER, STAGING
from resumekit.storage.sealed import seal, unseal
from resumekit.storage.step import list_steps, read_manifest
from resumekit.storage.tree import read_small, write_small

_MAX_BYTES = 64 << 10
_ID = re.compile(r"[0-9a-f]{32}")
# What open says where a name holds no regular file: a link, a directory or a pipe.
_NOT_A_FILE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO)


@dataclass(frozen=True)
class Owner:
    """Who works in a run directory.

    Args:
        run_id: of the run, kept over all its attempts; 32 hexadecimal digits.
        attempt: of this process start; 32 hexadecimal digits.
        host: where it runs.
        pid: its process there.
        started: when, ISO 8601 in UTC; for people.
    """

    run_id: str
    attempt: str
    host: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls, run_id: str | None = None) -> Owner:
        """A new attempt, of this run or of a new one."""
        started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        run_id = run_id or uuid.uuid4().hex
        return cls(run_id, uuid.uuid4().hex, socket.gethostname(), os.getpid(), started)

    def to_bytes(self) -> bytes:
        """The record file."""
        return seal(asdict(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Owner:
        """The record that a file holds.

        Raises:
            CorruptCheckpointError: it is damaged.
        """
        content = unseal(data, where=OWNER)
        names = {item.name for item in fields(cls)}
        right = (
            set(content) == names
            and all(isinstance(content[name], str) for name in names - {"pid"})
            and type(content["pid"]) is int
            and _ID.fullmatch(content["run_id"])
            and _ID.fullmatch(content["attempt"])
        )
        if not right:
            raise CorruptCheckpointError(OWNER, found="fields that an owner record does not have")
        return cls(**content)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, started {self.started}"


def read_owner(file_system: FileSystem, directory: Path) -> Owner | None:
    """The record in a run directory; None where there is none, or only a damaged one.

    Raises:
        OSError: it could not be read.
    """
    try:
        data = read_small(file_system, directory / OWNER, where=OWNER, max_bytes=_MAX_BYTES)
        return Owner.from_bytes(data)
    except CorruptCheckpointError:
        return None
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            return None
        raise


def find_run_id(file_system: FileSystem, directory: Path) -> str | None:
    """The id of the run that a directory belongs to; None where it belongs to none.

    The record knows it; without one, the newest manifest that verifies does.

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
        # A new id would turn the checkpoints that are there into those of another run.
        raise unsure
    return None


def write_owner(file_system: FileSystem, directory: Path, owner: Owner) -> None:
    """Puts a record in place, at once and durably; a kill leaves the old one or the new one.

    Raises:
        OSError: as the failing call said.
    """
    draft = directory / STAGING / f"owner-{owner.attempt}"
    write_small(file_system, draft, owner.to_bytes())
    file_system.rename(draft, directory / OWNER)
    file_system.fsync_dir(directory)


def check_owner(file_system: FileSystem, directory: Path, owner: Owner) -> None:
    """Makes sure that this attempt still owns the directory.

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
