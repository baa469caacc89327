"""Processes found as a whole, and killed as a whole, on this node.

A power cut or a scheduler takes all processes of a job at once. torchrun puts its workers into
sessions of their own, so a process group is not the whole job: processes are found by the chain of
parents, by their session, and by a marker in the environment with which they were started.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_POLL_SECONDS = 0.002
_GONE_TIMEOUT_SECONDS = 30.0


def kill_processes(root: int, marker: str = "") -> int:
    """SIGKILLs a process, its session, its descendants and all that have the marker.

    Returns when none of them runs any more (zombies that nobody reaps do not count).

    Args:
        root: the id of the process that was started, the leader of its own session.
        marker: ``NAME=value`` in the environment of processes that may be neither its descendants
            nor in its session.

    Returns:
        How many processes were found.

    Raises:
        TimeoutError: one of them did not die, e.g. it hangs in the kernel.
    """
    seen: set[int] = set()
    deadline = time.monotonic() + _GONE_TIMEOUT_SECONDS
    while True:
        found = processes_of(root, marker)
        seen |= found
        # The group first: one call reaches all of it at the same instant.
        if found or not _PROC.is_dir():
            with suppress(ProcessLookupError, PermissionError):  # nobody is left in it
                os.killpg(root, signal.SIGKILL)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A child whose parent has died already is not found again, and may still be dying.
        if not found and not any(is_running(pid) for pid in seen):
            return len(seen)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(seen)} are still there after SIGKILL")
        time.sleep(_POLL_SECONDS)


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        fields = _stat(pid)
    except OSError:
        return False
    return fields[0] not in "ZX"


def processes_of(root: int, marker: str) -> set[int]:
    """The ids of the living processes of one launch.

    Where there is no ``/proc`` it is empty, and only the process group can be reached.
    """
    if not _PROC.is_dir():
        return set()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            fields = _stat(pid)
            state, parent, session = fields[0], int(fields[1]), int(fields[3])
            if state in "ZX":
                continue
            parents[pid] = parent
            if session == root or (marker and marker.encode() in _environment(entry)):
                found.add(pid)
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
    found |= {pid for pid in parents if root in _ancestors(pid, parents)}
    return found - {os.getpid()}


def _stat(pid: int) -> list[str]:
    """State, parent, group, session and so on: what follows the name in ``/proc/<pid>/stat``."""
    text = (_PROC / str(pid) / "stat").read_text()
    return text.rpartition(")")[2].split()  # the name itself may hold parentheses


def _environment(entry: Path) -> list[bytes]:
    return (entry / "environ").read_bytes().split(b"\0")


def _ancestors(pid: int, parents: Mapping[int, int]) -> set[int]:
    """The process itself and its chain of parents."""
    chain: set[int] = set()
    current: int | None = pid
    while current is not None and current not in chain:
        chain.add(current)
        current = parents.get(current)
    return chain
