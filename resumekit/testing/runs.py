"""What was launched, and a first launch that several runs have in common."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from resumekit.testing.cells import Cell, KillPoint


@dataclass(frozen=True)
class LaunchResult:
    """One launch of a cell's function on all its ranks.

    Args:
        kill: where it was to be killed; None for the last launch.
        was_killed: whether it died there.
        failure: the last lines of the rank that failed; empty when none did.
        seconds: its wall-clock time.
    """

    kill: KillPoint | None
    was_killed: bool
    failure: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """All launches of one cell.

    Args:
        cell: what was run.
        directory: holds the training's own directory, the trace and the logs.
        trace: the trace of all launches.
        launches: in the order in which they were made.
        inject: component keys or slots that were not restored, separated by commas.
    """

    cell: Cell
    directory: Path
    trace: Path
    launches: tuple[LaunchResult, ...]
    inject: str | None = None

    @property
    def failure(self) -> str:
        """What the first failing launch wrote last; empty when none failed."""
        return next((launch.failure for launch in self.launches if launch.failure), "")

    @property
    def missed_kills(self) -> tuple[KillPoint, ...]:
        """Kill points that the run never came to."""
        return tuple(one.kill for one in self.launches if one.kill and not one.was_killed)

    @property
    def seconds(self) -> float:
        """The wall-clock time of all launches together."""
        return sum(launch.seconds for launch in self.launches)


class FirstLaunches:
    """First launches that were killed, kept as they left their directories.

    Cells that differ in what follows the first kill, as a run and its negative controls do, begin
    with the same launch. It is made once; each run goes on in the same directory, put back to what
    it was then. So there is one run of them at a time, and the one before is gone.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, KillPoint], Run] = {}

    def put_back(self, cell: Cell, inject: str | None) -> Run | None:
        """The run of this cell after its first launch; None if it was not made yet."""
        first = self._known.get((cell.run_key, cell.kills[0]))
        if first is None:
            return None
        shutil.rmtree(first.directory)
        shutil.copytree(_aside(first), first.directory, symlinks=True)
        return replace(first, cell=cell, inject=inject)

    def keep(self, run: Run) -> None:
        """Takes in a run that was launched once."""
        shutil.copytree(run.directory, _aside(run), symlinks=True)
        self._known[run.cell.run_key, run.cell.kills[0]] = run


def _aside(run: Run) -> Path:
    return run.directory.with_name(f"{run.directory.name}-first-launch")
