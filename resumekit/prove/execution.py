"""One run of a command: its launches, how each is recorded, and what each of them left."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from resumekit.attach import AttachSettings, attached_environment, observed_environment
from resumekit.errors import CommandFailedError, CommandTimeoutError
from resumekit.launcher import Activation, prepared_environment
from resumekit.launcher.processes import Launch
from resumekit.prove.attaching import has_checkpoint
from resumekit.prove.kills import Kill, KillInstant
from resumekit.prove.result import LaunchSummary
from resumekit.prove.workspaces import (
    LATEST_PLACEHOLDER,
    copy_workspace,
    prepared,
    stock_checkpoints,
    with_latest,
)
from resumekit.record.moments import (
    FAILED,
    STEP,
    TraceTail,
    find_trace,
    launch_directory,
    records_of,
)
from resumekit.record.trace import (
    INJECT_VARIABLE,
    KILL_VARIABLE,
    RUN_ROOT_VARIABLE,
    TRACE_VARIABLE,
    KillPoint,
)
from resumekit.recorder import RecorderSettings


def recorded_environment(
    environment: Mapping[str, str], directory: Path, settings: RecorderSettings
) -> dict[str, str]:
    """The environment of a launch whose training processes are recorded.

    Args:
        environment: of the launch otherwise.
        directory: an absent directory for the launcher.
        settings: what the recorder is asked for.
    """
    values = settings.as_dict()
    activations = (
        Activation("torch", "resumekit.recorder:record_torch", values),
        Activation("deepspeed", "resumekit.recorder:record_deepspeed", values),
    )
    return prepared_environment(environment, directory, activations)


def write_positions(directory: Path, traces: Iterable[Path]) -> Path:
    """Writes the weights that a relaunch may continue from, one file per rank.

    Args:
        directory: where to; made if missing.
        traces: the records of the uninterrupted run and of this run so far.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows: dict[int, list[list[object]]] = {}
    for trace in traces:
        for rank, attempts in find_trace(trace).items():
            for record in records_of(attempts, STEP):
                fields = record.fields
                row = [record.step, fields["weights"], fields["counter"], fields["lr"]]
                rows.setdefault(rank, []).append(row)
    for rank, listed in rows.items():
        (directory / f"rank-{rank:05d}.json").write_text(json.dumps(listed))
    return directory


def failure_of_recorder(directory: Path) -> str:
    """Why the recorder stopped; empty when it did not."""
    attempts = (attempt for each in find_trace(directory).values() for attempt in each)
    return next((record.fields["text"] for record in records_of(attempts, FAILED)), "")


# ---------------------------------------------------------------- launches

_POLL_SECONDS = 0.001
# Helpers of multiprocessing end a moment after the process that they serve.
_OUTLIVE_SECONDS = 1.0
_ATTACHED = "attached"


@dataclass(frozen=True)
class FinishedRun:
    """What is left of a run.

    Args:
        trace: the trace of all launches.
        launches: every launch, in order.
        failure: what the failing launch wrote last; empty when none failed.
        num_left_behind: processes that outlived a launch which ended by itself.
        has_stock_checkpoints: whether the script saved by its own means.
    """

    trace: Path
    launches: tuple[LaunchSummary, ...]
    failure: str
    num_left_behind: int
    has_stock_checkpoints: bool

    @property
    def records(self) -> Path:
        """What the recorder wrote in all launches."""
        return self.trace.with_name("records")

    @property
    def seconds(self) -> float:
        """The wall-clock time of all launches together."""
        return sum(launch.seconds for launch in self.launches)

    @property
    def attached(self) -> list[Path]:
        """What each launch left about its Trainers; empty unless the plan asks for it."""
        folder = self.trace.with_name(_ATTACHED)
        return [launch_directory(folder, launch.number) for launch in self.launches]


@dataclass(frozen=True)
class Plan:
    """How every run of one command is launched.

    Args:
        command: as the user wrote it.
        world: ranks.
        timeout_seconds: the longest that one launch may take.
        step_seconds: the usual time of a step; scales the instants of kills.
        on_event: called with one line about what happens.
        digest_every: the recorder digests states at every n-th step.
        reference: the uninterrupted run, once there is one.
        follows_records: whether steps are counted by the recorder, not by the script's trace.
        relaunch: the command of every launch but the first, ``{latest}`` for the newest checkpoint
            of the script; empty where it is the same.
        workspace: the directory of which each run gets a copy to work in; None: none is needed.
        tolerance: the relative difference that values may have; None: none.
        awaits_checkpoint: whether random kills fall after the first checkpoint.
        with_resumekit: whether each launch leaves what it imports, and which Trainers train in it.
        save_every: of the callback that is attached to each Trainer; None: none is attached.
    """

    command: tuple[str, ...]
    world: int
    timeout_seconds: float
    step_seconds: float
    on_event: Callable[[str], None]
    digest_every: int = 1
    reference: FinishedRun | None = None
    follows_records: bool = False
    relaunch: tuple[str, ...] = ()
    workspace: Path | None = None
    tolerance: float | None = None
    awaits_checkpoint: bool = False
    with_resumekit: bool = False
    save_every: int | str | None = None

    def __str__(self) -> str:
        return " ".join(self.command)


class _RunUnderWay:
    """A run while it is executed: its directories, its launches, and whether it has saved.

    Args:
        plan: what to launch.
        directory: of the run.

    Attributes:
        work: the copy of the working directory.
    """

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._plan, self._directory = plan, directory
        self._since_ns = time.time_ns()  # what is older was copied (Unix time)
        self._files = directory / "files"  # what ``{dir}`` stands for
        self.work = directory / "work"
        self._run = directory / "runs" / _ATTACHED  # the run directory of the attached callback
        self._saved_at: int | None = None  # a step after its first checkpoint was seen
        self._looked_at: int | None = None

    def attached(self, number: int) -> Path:
        """What a launch leaves about its Trainers."""
        return launch_directory(self._directory / _ATTACHED, number)

    def checkpoints(self) -> list[Path]:
        """The checkpoints of the script, oldest first."""
        return stock_checkpoints([self._files, self.work], since_ns=self._since_ns)

    def is_saved(self, step: int) -> bool:
        """Whether it was saved before this step, the newest one."""
        if self._saved_at is None and step != self._looked_at:
            self._looked_at = step
            is_attached = self._plan.save_every is not None
            has_saved = has_checkpoint(self._run) if is_attached else bool(self.checkpoints())
            self._saved_at = step if has_saved else None
        return self._saved_at is not None and step > self._saved_at

    def followed(self, number: int) -> list[Path]:
        """What shows the steps of a launch, and the checkpoints of an attached callback."""
        traces = ["trace"]
        if self._plan.follows_records:
            traces = ["records"] if self._plan.save_every is None else ["records", "trace"]
        return [launch_directory(self._directory / each, number) for each in traces]

    def start(self, number: int, kill: Kill | None, inject: str | None) -> Launch:
        """Starts a launch, which kills itself at a chosen point."""
        plan, directory = self._plan, self._directory
        point = kill if isinstance(kill, KillPoint) else None
        at = "" if point is None else str(point)
        # The recorder sees steps, not checkpoints.
        is_recorded = plan.follows_records and (point is None or point.event == STEP)
        variables = {
            **os.environ,
            TRACE_VARIABLE: str(launch_directory(directory / "trace", number)),
            # An attached callback has its directory, and the script has none.
            RUN_ROOT_VARIABLE: str(directory / "runs") if plan.save_every is None else None,
            KILL_VARIABLE: None if is_recorded or not at else at,
            INJECT_VARIABLE: inject,
            "PYTHONUNBUFFERED": "1",
        }
        environment = {name: text for name, text in variables.items() if text is not None}
        settings = self._recorder_settings(number, kill=at if is_recorded else "")
        if plan.with_resumekit:
            private = self.attached(number)
            if plan.save_every is None:  # only imports are recorded
                environment = observed_environment(environment, private)
            else:
                callback = AttachSettings(str(self._run), plan.save_every)
                environment = attached_environment(environment, private, callback)
        launcher = launch_directory(directory / "launcher", number)
        command = self._relaunched(number) if number and plan.relaunch else plan.command
        return Launch(
            prepared(command, world=plan.world, directory=self._files),
            recorded_environment(environment, launcher, settings),
            marker=TRACE_VARIABLE,
            log=directory / "logs" / f"launch-{number:05d}.txt",
            cwd=None if plan.workspace is None else self.work,
        )

    def _relaunched(self, number: int) -> Sequence[str]:
        """The command of a launch that resumes: the first one again where there is nothing yet."""
        plan = self._plan
        if not any(LATEST_PLACEHOLDER in word for word in plan.relaunch):
            return plan.relaunch
        checkpoints = self.checkpoints()
        if not checkpoints:
            plan.on_event(f"launch {number}: no checkpoint yet, the first command again")
            return plan.command
        latest, count = checkpoints[-1], len(checkpoints)
        plan.on_event(f"launch {number}: {{latest}} is {latest.name}, the newest of {count}")
        return with_latest(plan.relaunch, latest)

    def _recorder_settings(self, number: int, *, kill: str) -> RecorderSettings:
        positions, records = "", self._directory / "records"
        if number and self._plan.reference is not None:
            known = launch_directory(self._directory / "positions", number)
            positions = str(write_positions(known, [self._plan.reference.records, records]))
        return RecorderSettings(
            directory=str(launch_directory(records, number)),
            positions=positions,
            kill=kill,
            digest_every=self._plan.digest_every,
        )

    def watch(
        self, launch: Launch, tail: TraceTail, kill: Kill | None, check: Callable[[], None] | None
    ) -> tuple[bool, int | None]:
        """Whether the launch was killed, and then its newest step; otherwise it ended by itself."""
        plan = self._plan
        deadline = time.monotonic() + plan.timeout_seconds
        while launch.poll() is None:
            newest = tail.poll() if kill is not None or check is not None else None
            if check is not None and newest is not None:
                check()
                check = None
            if isinstance(kill, KillInstant) and self._is_due(kill, newest):
                time.sleep(kill.fraction * plan.step_seconds)
                if launch.poll() is None:
                    launch.kill_all()
                    return True, tail.poll()
            if _is_at(kill, tail):
                break
            if time.monotonic() > deadline:
                raise CommandTimeoutError(
                    str(plan),
                    found=f"did not end within {plan.timeout_seconds:.0f} seconds; its last "
                    f"output: {launch.log_tail()}",
                    remedy="Give it more time (--timeout), or make the training shorter",
                )
            time.sleep(_POLL_SECONDS)
        newest = tail.poll() if kill is not None else None
        if not _is_at(kill, tail):
            return False, None
        # The process that came there killed itself; a launcher and other ranks may live on for a
        # while.
        launch.kill_all()
        return True, newest

    def _is_due(self, kill: KillInstant, newest: int | None) -> bool:
        if newest is None or newest < kill.step:
            return False
        return not self._plan.awaits_checkpoint or self.is_saved(newest)


def _is_at(kill: Kill | None, tail: TraceTail) -> bool:
    return isinstance(kill, KillPoint) and (kill.event, kill.number) in tail.events


def execute(
    plan: Plan,
    directory: Path,
    *,
    kills: Sequence[Kill] = (),
    inject: str | None = None,
    on_first_step: Callable[[Path], None] | None = None,
) -> FinishedRun:
    """Launches the command until it ends by itself.

    Args:
        plan: what to launch.
        directory: an absent directory for the run's own files, traces and logs.
        kills: one launch is killed at each of them; a launch that ends before ends the run.
        inject: component keys or slots that are not to be restored.
        on_first_step: called at the first step of each launch with what it has left about its
            Trainers; what it raises ends the run.

    Raises:
        CommandTimeoutError: a launch did not end in time; it was killed.
        ConfigurationError: the command cannot be started.
    """
    for name in ("files", "runs", "logs"):
        (directory / name).mkdir(parents=True)
    run = _RunUnderWay(plan, directory)
    if plan.workspace is not None:
        left_out = copy_workspace(plan.workspace, run.work)
        if left_out:
            plan.on_event(f"links to other directories are not copied: {', '.join(left_out)}")
    launches: list[LaunchSummary] = []
    for kill in (*kills, None):
        number = len(launches)
        began = time.monotonic()
        launch = run.start(number, kill, inject)
        tail = TraceTail(*run.followed(number))
        check = None if on_first_step is None else partial(on_first_step, run.attached(number))
        try:
            was_killed, newest = run.watch(launch, tail, kill, check)
        except BaseException:  # also Ctrl-C: nothing that was started here stays
            launch.kill_all()
            raise
        status = launch.poll() or 0
        seconds = time.monotonic() - began
        at = str(kill) if isinstance(kill, KillPoint) else None
        launches.append(LaunchSummary(number, newest, was_killed, status, seconds, at))
        if was_killed:
            plan.on_event(f"launch {number}: killed {launches[-1].where}, {seconds:.1f} s")
            continue
        plan.on_event(f"launch {number}: ended with status {status}, {seconds:.1f} s")
        failure = "" if status == 0 else f"exit status {status}: {launch.log_tail()}"
        return FinishedRun(
            trace=directory / "trace",
            launches=tuple(launches),
            failure=failure,
            num_left_behind=launch.kill_all(grace_seconds=_OUTLIVE_SECONDS),
            has_stock_checkpoints=bool(run.checkpoints()),
        )
    raise AssertionError("the last launch is never killed")


def execute_uninterrupted(
    plan: Plan, directory: Path, *, on_first_step: Callable[[Path], None] | None = None
) -> FinishedRun:
    """One launch that nobody kills.

    Args:
        plan: what to launch.
        directory: see ``execute``.
        on_first_step: see ``execute``.

    Raises:
        CommandFailedError: the command failed by itself.
        CommandTimeoutError: it did not end in time.
    """
    run = execute(plan, directory, on_first_step=on_first_step)
    if run.failure:
        raise CommandFailedError(str(plan), found=f"failed without being killed, {run.failure}")
    return run
