"""What a save does to a disk, one record for each call that changes it or makes it durable."""

from __future__ import annotations

import re
from dataclasses import dataclass

# What differs between two recordings of one scenario: nonces, digests over them and the time.
_VOLATILE = re.compile(rb"[0-9a-f]{12,}|\d{4}-\d\d-\d\dT[0-9:.+Z-]+|(?<=\"pid\": )\d+")

_MAX_TEXT_BYTES = 1 << 19  # more is tensors, which have none of these


def canonical(data: bytes) -> bytes:
    """The same number of bytes, equal for two recordings of one scenario."""
    if len(data) > _MAX_TEXT_BYTES:
        return data
    return _VOLATILE.sub(lambda found: b"#" * len(found[0]), data)


@dataclass(frozen=True)
class Operation:
    """One call. ``rank`` made it, between the barriers number ``phase`` and ``phase + 1``."""

    rank: int
    phase: int
    call: str  # for people, e.g. "rename .staging/x step-00000001"


@dataclass(frozen=True)
class Link(Operation):
    """mkdir or create: a directory gets a name for a new inode."""

    parent: int
    name: str
    child: int
    is_directory: bool = False
    is_new: bool = True


@dataclass(frozen=True)
class Unlink(Operation):
    """unlink or rmdir: a directory loses a name."""

    parent: int
    name: str
    child: int


@dataclass(frozen=True)
class Move(Operation):
    """rename: one directory loses a name and the other gets one, both or neither."""

    source: int
    source_name: str
    target: int
    target_name: str
    child: int


@dataclass(frozen=True)
class Append(Operation):
    """write: a file grows."""

    file: int
    data: bytes


@dataclass(frozen=True)
class Sync(Operation):
    """fsync of a file."""

    file: int


@dataclass(frozen=True)
class SyncDirectory(Operation):
    """fsync of a directory: its names are durable, what they name is not."""

    directory: int


@dataclass(frozen=True)
class FailedSync(Operation):
    """An fsync that failed: what was not on the disk by then never gets there.

    Linux marks the pages clean, and the next fsync of them succeeds (Rebello et al., ATC 2020).
    """

    inode: int


NameChange = Link | Unlink | Move
