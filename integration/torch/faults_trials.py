"""Launches a training run with a fault in it, launches it again, and judges what came of it."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from failpoints import launch as launch_with_faults
from faults_training import launch

from resumekit.errors import CheckpointError
from resumekit.prove import Verdict, compare
from resumekit.record.moments import launch_directory
from resumekit.record.trace import KILL_VARIABLE, TRACE_VARIABLE
from resumekit.storage.directories import StepName
from resumekit.storage.store import Store
from resumekit.testing.launchers import ForkServer
from resumekit.testing.task import Task, target_of

KILLED = -9
TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Ended:
    """How one launch ended.

    Args:
        statuses: of each rank's process; negative for a signal.
        output: what they wrote.
    """

    statuses: tuple[int, ...]
    output: str

    @property
    def succeeded(self) -> bool:
        """Whether every rank ended by itself and well."""
        return not any(self.statuses)

    @property
    def was_killed(self) -> bool:
        """Whether a rank was killed."""
        return KILLED in self.statuses

    @property
    def error(self) -> str:
        """The last line, where an uncaught exception shows its type and text."""
        return self.output.strip().rpartition("\n")[2]


class Trial:
    """One run directory with its trace, launched as often as it takes.

    Attributes:
        training: the function that trains, with the run directory as its first argument.
    """

    training: Callable[..., None] = staticmethod(launch)

    def __init__(self, server: ForkServer, directory: Path) -> None:
        self._server = server
        self._directory = directory
        self._num_launches = len(list(self.trace.iterdir())) if self.trace.exists() else 0
        self.run.parent.mkdir(parents=True, exist_ok=True)

    @property
    def run(self) -> Path:
        """The run directory."""
        return self._directory / "run"

    def run_of(self, rank: int) -> Path:
        """The run directory, as the node of a rank names it."""
        return self.run

    @property
    def trace(self) -> Path:
        """The trace of all launches."""
        return self._directory / "trace"

    def launch(
        self,
        *,
        failpoints: str | None = None,
        on_rank: int = 0,
        kill: str | None = None,
        world_size: int = 1,
        **options: str | int,
    ) -> Ended:
        """Runs the command once.

        Args:
            failpoints: faults of the file system on one of the ranks.
            on_rank: that rank.
            kill: what ``RESUMEKIT_TRACE_KILL`` is.
            world_size: how many ranks.
            **options: for the training function.
        """
        trace = launch_directory(self.trace, self._num_launches)
        self._num_launches += 1
        logs = [
            self._directory / f"launch-{self._num_launches}-rank-{rank}.log"
            for rank in range(world_size)
        ]
        environment = {TRACE_VARIABLE: str(trace), KILL_VARIABLE: kill}
        tasks = []
        for rank, log in enumerate(logs):
            target, arguments = target_of(self.training), dict[str, Any](options)
            if failpoints is not None and rank == on_rank:
                arguments |= {"target": target, "failpoints": failpoints}
                target = target_of(launch_with_faults)
            tasks.append(Task(target, str(self.run_of(rank)), arguments, environment, str(log)))
        statuses = self._server.run(tasks, TIMEOUT_SECONDS)
        if len(statuses) < world_size:
            raise AssertionError(f"a launch takes more than {TIMEOUT_SECONDS:.0f} seconds")
        output = "".join(log.read_text(errors="replace") for log in logs)
        return Ended(tuple(statuses[rank] for rank in range(world_size)), output)

    def newest_complete(self) -> StepName | None:
        """The newest checkpoint that verifies; found without the code that resumes."""
        if not self.run.is_dir():
            return None
        store = Store(self.run)
        for name in store.step_names():
            try:
                store.open_step(name).verify()
            except CheckpointError:
                continue
            return name
        return None

    def judge(self, reference: Path, *, expect_resume: bool = True) -> Verdict:
        """Compares all launches, step by step and bit for bit, with the uninterrupted run."""
        return compare(reference, self.trace, expect_resume=expect_resume)

    def remove(self) -> None:
        """Frees its bytes."""
        shutil.rmtree(self._directory)

    def copy_to(self, directory: Path, server: ForkServer) -> Trial:
        """A trial that continues where this one is."""
        shutil.copytree(self._directory, directory)
        return Trial(server, directory)


class Trials:
    """The uninterrupted run, and a run that was killed between two saves.

    Args:
        directory: an empty one.
        server: forks every launch.
        world_size: how many ranks.
        **options: for the training function.
    """

    def __init__(
        self,
        directory: Path,
        server: ForkServer,
        *,
        world_size: int = 1,
        **options: Any,
    ) -> None:
        self._server = server
        self._directory = directory
        self._numbers = itertools.count(1)
        reference = Trial(self._server, directory / "reference")
        ended = reference.launch(world_size=world_size, **options)
        assert ended.succeeded, ended.output
        self.reference = reference.trace
        self._begun = Trial(self._server, directory / "begun")
        ended = self._begun.launch(kill="step:4", world_size=world_size, **options)
        assert ended.was_killed, ended.output
        assert self._begun.newest_complete() == StepName(3)

    def new(self) -> Trial:
        """A run that has saved step 3 and was killed after step 4."""
        return self._begun.copy_to(self._next_directory(), self._server)

    def fresh(self) -> Trial:
        """A run that has not begun."""
        return Trial(self._server, self._next_directory())

    def _next_directory(self) -> Path:
        return self._directory / f"trial-{next(self._numbers):04d}"
