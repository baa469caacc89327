"""Which ranks' processes have ended, as far as one node can see. No collective but the exchange."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from resumekit.distributed import World

# Not psutil: ranks compare start times, and create_time() of psutil 7.2 adds the time of the boot,
# which moves when the clock of the node is set. A number of ticks since the boot never changes.
_ENDED = "ZX"  # states in /proc/<pid>/stat of a process that runs no more


@dataclass(frozen=True)
class ProcessId:
    """A process, also when its number is given to another one later.

    Args:
        node: its host among those of the job.
        pid: its number there.
        started: when it began, in clock ticks since the boot; empty where the system has no /proc.
    """

    node: str
    pid: int
    started: str

    @classmethod
    def of_this_process(cls, node: str) -> ProcessId:
        """This process."""
        _, started = _look(os.getpid()) or ("", "")
        return cls(node, os.getpid(), started)

    @property
    def has_ended(self) -> bool:
        """Whether there is no such process on this node any more."""
        found = _look(self.pid)
        if found is None:
            return True
        state, started = found
        return started != self.started or state in _ENDED


class Processes:
    """The processes of all ranks.

    Args:
        node: of this rank.
        by_rank: the process of each rank.
    """

    def __init__(self, node: str, by_rank: dict[int, ProcessId]) -> None:
        # A process of another container may be on this node and yet invisible.
        self._watched = {
            rank: process
            for rank, process in by_rank.items()
            if process.node == node and not process.has_ended
        }

    @classmethod
    def of(cls, world: World) -> Processes:
        """The processes of the job. Collective."""
        every = world.gather(ProcessId.of_this_process(world.node))
        processes = cls(world.node, dict(zip(world.ranks, every, strict=True)))
        world.gather(None)  # all have looked while all were alive: from now on a rank may end
        return processes

    def ended(self, ranks: Collection[int]) -> list[int]:
        """Those of some ranks whose process has ended; of other nodes' nothing is known."""
        watched = ((rank, self._watched[rank]) for rank in ranks if rank in self._watched)
        return [rank for rank, process in watched if process.has_ended]


def _look(pid: int) -> tuple[str, str] | None:
    """State and start time of a process, both empty without /proc; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ("", "") if _exists(pid) else None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return fields[0], fields[19]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
