"""The conformance kit: runs a training function uninterrupted and killed, and compares."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from resumekit.errors import CommandFailedError, CommandTimeoutError
from resumekit.launcher.processes import tail_of
from resumekit.prove import Verdict, compare
from resumekit.record.moments import launch_directory
from resumekit.record.trace import (
    INJECT_VARIABLE,
    KILL_VARIABLE,
    RUN_ROOT_VARIABLE,
    TRACE_VARIABLE,
    KillPoint,
)
from resumekit.testing.cells import Cell
from resumekit.testing.launchers import ForkServer
from resumekit.testing.task import Task
from resumekit.testing.trace_checks import journal_problem, work_of_launch


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
        """Kill points that the run never reached."""
        return tuple(one.kill for one in self.launches if one.kill and not one.was_killed)

    @property
    def seconds(self) -> float:
        """The wall-clock time of all launches together."""
        return sum(launch.seconds for launch in self.launches)


_KILLED = -9

# torch 2.13 _compile.py imports torch._dynamo at an optimizer's first step: a second per launch.
DEFAULT_PRELOAD = ("torch", "torch._dynamo", "numpy")

# One thread per process: several ranks and jobs share few cores, and the sums stay in one order.
DEFAULT_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class Kit:
    """Runs cells. Use it as a context manager, one for many cells: it keeps a warm fork server.

    A forked process differs from a cold one in what Python fixes at its start (the seed of string
    hashes), in modules that are imported already, and at its end: after the exit handlers it is
    gone, without taking its modules apart. Run one cell per adapter with ``cold=True``.

    Args:
        directory: an empty directory for everything that the runs write.
        preload: modules that the server imports before it forks; add the frameworks here.
        environment: variables set for every process, beside the inherited ones.
        cold: start every process as a fresh interpreter: slow, and free of anything inherited.
            Only such a kit may launch from several threads at the same time.
        timeout_seconds: the longest that one launch may take.
        peers_seconds: how long the other ranks of a job go on after one of them died.
    """

    def __init__(
        self,
        directory: Path,
        *,
        preload: Sequence[str] = DEFAULT_PRELOAD,
        environment: Mapping[str, str] = DEFAULT_ENVIRONMENT,
        cold: bool = False,
        timeout_seconds: float = 120.0,
        peers_seconds: float = 0.1,
    ) -> None:
        self._peers_seconds = peers_seconds
        self._directory = directory
        self._timeout_seconds = timeout_seconds
        self._uninterrupted: dict[str, Run] = {}
        self._first_launches: dict[tuple[str, KillPoint], Run] = {}
        self._num_runs = 0
        self._is_cold = cold
        self._environment = {**os.environ, **environment}
        self._server = ForkServer(() if cold else preload, self._environment)

    def __enter__(self) -> Kit:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the fork server."""
        self._server.close()

    def run_uninterrupted(self, cell: Cell) -> Run:
        """One launch that nobody kills; made once for all cells that differ in their kills alone.

        Raises:
            CommandFailedError: the function failed.
            CommandTimeoutError: it did not end in time.
        """
        known = self._uninterrupted.get(cell.run_key)
        if known is None:
            known = self._continue(self.new_run(cell), ())
            if known.failure:
                raise CommandFailedError(str(cell), found=f"failed uninterrupted: {known.failure}")
            self._uninterrupted[cell.run_key] = known
        return known

    def run_killed(self, cell: Cell, *, inject: str | None = None) -> Run:
        """One launch for each kill point, and one that runs to its end.

        Args:
            cell: what to run.
            inject: component keys or slots that are not to be restored, separated by commas.

        Raises:
            CommandTimeoutError: a launch did not end in time.
        """
        return self._continue(self.new_run(cell, inject=inject), cell.kills)

    def new_run(self, cell: Cell, *, inject: str | None = None) -> Run:
        """A run without any launch; ``run_again`` makes them, one by one.

        Args:
            cell: what to run.
            inject: component keys or slots that are not to be restored, separated by commas.
        """
        self._num_runs += 1
        directory = self._directory / f"run-{self._num_runs:04d}"
        (directory / "training").mkdir(parents=True)
        return Run(cell, directory, directory / "trace", (), inject)

    def run_again(
        self, run: Run, *, kill: KillPoint | None = None, leaves_on: str | None = None
    ) -> Run:
        """The run with one launch more, in its directory: the identical command, left alone.

        Put another cell into the run, and the launch has other options or another number of ranks.

        Args:
            run: what was launched so far.
            kill: where this launch is to be killed; None lets it run to its end.
            leaves_on: the signal with which the function asks one of its ranks to leave, at an
                instant of its own choice.

        Raises:
            CommandTimeoutError: the launch did not end in time.
        """
        if leaves_on is not None:
            kill = KillPoint.nowhere(leaves_on)
        if self._uninterrupted.get(run.cell.run_key) is run:
            del self._uninterrupted[run.cell.run_key]  # from now on it is no single launch
        return replace(run, launches=(*run.launches, self._launch(run, kill)))

    def judge(self, cell: Cell, *, inject: str | None = None) -> tuple[Verdict, Run]:
        """The verdict on the killed run against the uninterrupted one, and the killed run."""
        reference = self.run_uninterrupted(cell)
        run = self.run_killed(cell, inject=inject)
        return _verdict(reference, run), run

    def assert_exact(self, cell: Cell) -> Verdict:
        """Fails unless the killed run is the uninterrupted one, bit for bit.

        Its journal must say the same of the steps that were repeated.

        Raises:
            AssertionError: they differ, a launch failed, or a kill point was never reached.
        """
        verdict, run = self._judge_next(cell)
        _require_exact(run, verdict)
        return verdict

    def assert_finished(self, cell: Cell) -> Verdict:
        """Fails unless the command does nothing when it is given once more after the run's end.

        The run is killed as the cell says and launched until it ends; the further launch must train
        no step, save nothing and find the end state of the uninterrupted run.

        Raises:
            AssertionError: it did something, or the run was not exact in the first place.
        """
        reference = self.run_uninterrupted(cell)
        run = self.run_killed(cell)
        if not run.failure:
            run = self.run_again(run)
        verdict = _verdict(reference, run)
        work = work_of_launch(run.trace, len(run.launches) - 1)
        if work and not run.failure:
            raise AssertionError(f"{cell}: launched again after its end, {work}")
        _require_exact(run, verdict)
        return verdict

    def assert_caught(self, cell: Cell, component: str, *, inject: bool = True) -> Verdict:
        """Fails unless a defect in one component is found and that component is named.

        Args:
            cell: what to run.
            component: the component key or slot (or the field of the step record).
            inject: whether the Checkpointer skips its restore; False for a function that is
                wrong by itself.

        Raises:
            AssertionError: the run was exact, or something else was named.
        """
        verdict, run = self._judge_next(cell, inject=component if inject else None)
        if verdict.divergence is None:
            raise AssertionError(f"{cell}: exact without {component}. {run.failure}".rstrip())
        named = verdict.divergence
        if component not in (named.component, named.slot) or not verdict.is_reproducible:
            raise AssertionError(f"{cell}: {component} was left out, and the verdict is {verdict}")
        return verdict

    def _judge_next(self, cell: Cell, *, inject: str | None = None) -> tuple[Verdict, Run]:
        """As ``judge``, with a killed run that the next call may replace."""
        if not cell.kills:
            return self.judge(cell, inject=inject)
        reference = self.run_uninterrupted(cell)
        run = self._continue(self._after_first_kill(cell, inject), cell.kills[1:])
        return _verdict(reference, run), run

    def _after_first_kill(self, cell: Cell, inject: str | None) -> Run:
        """The run of a cell after its first launch, which is made once and kept aside.

        Cells that differ in what follows the first kill, as a run and its negative controls do,
        begin with the same launch. Each run continues in the same directory, restored to its
        content after that launch. So one such run exists at a time, and replaces the one before.
        """
        key = (cell.run_key, cell.kills[0])
        first = self._first_launches.get(key)
        if first is None:
            first = self.run_again(self.new_run(cell, inject=inject), kill=cell.kills[0])
            shutil.copytree(first.directory, _aside(first), symlinks=True)
            self._first_launches[key] = first
            return first
        shutil.rmtree(first.directory)
        shutil.copytree(_aside(first), first.directory, symlinks=True)
        return replace(first, cell=cell, inject=inject)

    def _continue(self, run: Run, kills: Sequence[KillPoint]) -> Run:
        """One launch for each kill point, and one that runs to its end, unless one fails."""
        for kill in (*kills, None):
            if run.failure:
                break
            run = self.run_again(run, kill=kill)
        return run

    def _launch(self, run: Run, kill: KillPoint | None) -> LaunchResult:
        began = time.monotonic()
        cell, directory, number = run.cell, run.directory, len(run.launches)
        trace = launch_directory(run.trace, number)
        logs = [
            directory / f"launch-{number:05d}-rank-{rank:05d}.log"
            for rank in range(cell.world_size)
        ]
        tasks = []
        for rank, log in enumerate(logs):
            environment = {
                TRACE_VARIABLE: str(trace),
                KILL_VARIABLE: str(kill) if kill and kill.rank in (None, rank) else None,
                INJECT_VARIABLE: run.inject,
                RUN_ROOT_VARIABLE: None,
            }
            where = str(directory / "training")
            tasks.append(
                Task(cell.target, where, cell.options, environment, str(log), self._is_cold)
            )
        asked = None if kill is None or kill.exit_status < 0 else kill.exit_status
        with ExitStack() as ended:
            server = self._server
            if self._is_cold:
                # Has imported nothing, so each launch has its own: several threads may launch.
                server = ForkServer((), self._environment)
                ended.callback(server.close)
            # One that fails or dies takes all others with it, as a launcher would.
            statuses = server.run(
                tasks,
                self._timeout_seconds,
                expected=(0, asked),
                peers_seconds=self._peers_seconds,
            )
        if len(statuses) < len(logs) and not any(statuses.values()):
            tails = "\n".join(map(tail_of, logs))
            raise CommandTimeoutError(
                str(cell),
                found=f"a launch took longer than {self._timeout_seconds:.0f} seconds: {tails}",
            )
        wanted = _KILLED if kill is None else kill.exit_status
        failed = [rank for rank, status in statuses.items() if status not in (0, wanted)]
        was_killed = wanted in statuses.values()
        if kill is not None and wanted != _KILLED:  # asked to leave, all ranks do so
            was_killed = list(statuses.values()) == [wanted] * cell.world_size
        failure = "" if was_killed or not failed else tail_of(logs[failed[0]]) or "no output"
        if was_killed and kill is None:
            failure = "killed by SIGKILL, by nobody here (out of memory?)"
        return LaunchResult(
            kill, was_killed and kill is not None, failure, time.monotonic() - began
        )


def _aside(run: Run) -> Path:
    return run.directory.with_name(f"{run.directory.name}-first-launch")


def _verdict(reference: Run, run: Run) -> Verdict:
    return compare(reference.trace, run.trace, expect_resume=bool(run.cell.kills))


def _require_exact(run: Run, verdict: Verdict) -> None:
    if run.failure:
        raise AssertionError(f"{run.cell}: a launch failed:\n{run.failure}")
    if run.missed_kills:
        missed = ", ".join(map(str, run.missed_kills))
        raise AssertionError(f"{run.cell}: the run never reached the kill point {missed}")
    if not verdict.exact:
        raise AssertionError(f"{run.cell}: {verdict}")
    problem = journal_problem(run.directory / "training")
    if problem:
        raise AssertionError(f"{run.cell}: exact, but the {problem}")
