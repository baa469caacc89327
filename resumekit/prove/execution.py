"""One run of a command: when it is killed, its launches, and what each of them left."""

from __future__ import annotations

import os
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resumekit.errors import (
    CommandFailedError,
    CommandTimeoutError,
    ConfigurationError,
    KillPointNotReachedError,
    ProveError,
)
from resumekit.prove.processes import Launch, prepared
from resumekit.prove.result import LaunchSummary
from resumekit.prove.trace_records import (
    CHECKPOINT,
    Attempt,
    TraceTail,
    launch_directory,
    records_of,
    steps_of,
)
from resumekit.tracing import (
    INJECT_VARIABLE,
    KILL_VARIABLE,
    RUN_ROOT_VARIABLE,
    TRACE_VARIABLE,
    KillPoint,
)


@dataclass(frozen=True)
class KillInstant:
    """Between two steps of a run.

    Args:
        step: the step that must have been traced.
        fraction: how much of a step's usual time passes after that, from 0 to 1.
    """

    step: int
    fraction: float


def kill_instants(
    steps: Sequence[int], num_kills: int, *, first_saved: int | None, rng: random.Random
) -> tuple[KillInstant, ...]:
    """Random instants in ascending order, one in each of ``num_kills`` equal parts of a run.

    The last one falls behind the first save, or nothing could be resumed; where it is not known
    when a run saves, it falls into the second half.

    Args:
        steps: the optimizer steps of the uninterrupted run, ascending.
        num_kills: how many instants.
        first_saved: the step of the first checkpoint, if the trace contains one.
        rng: the source of the instants.

    Raises:
        ProveError: the run is too short for that, or saves nothing before its last step.
    """
    num_gaps = len(steps) - 1
    if num_gaps < num_kills:
        raise ProveError(
            "the command",
            found=f"trained {len(steps)} steps",
            expected=f"more than {num_kills}, one for each kill",
            remedy="Train longer, or ask for fewer kills",
        )
    saved = len(steps) // 2 if first_saved is None else bisect_left(steps, first_saved)
    if num_kills and saved >= num_gaps and first_saved is not None:
        raise ProveError(
            "the command",
            found=f"saved nothing before its last step, {steps[-1]}",
            expected="a checkpoint that a killed run can resume from",
            remedy="Save more often",
        )
    width = num_gaps / num_kills if num_kills else 0.0
    instants = [rng.uniform(part * width, (part + 1) * width) for part in range(num_kills)]
    if instants and instants[-1] < saved:
        instants[-1] = rng.uniform(min(saved, num_gaps - 1), num_gaps)
    # uniform() may give its upper bound, and behind the last step there is nothing to kill.
    instants = [min(at, num_gaps - 1e-6) for at in instants]
    return tuple(KillInstant(steps[int(at)], at % 1.0) for at in instants)


def chosen_points(
    at: Sequence[str], *, kills: int | None, seed: int | None
) -> tuple[KillPoint, ...]:
    """The kill points that a user named; empty when the kills are to be random.

    Raises:
        ConfigurationError: one is not a point, or random kills were asked for as well.
    """
    if at and (kills is not None or seed is not None):
        raise ConfigurationError(
            "at",
            found=f"given together with {'seed' if kills is None else 'kills'}",
            expected="either chosen points or random instants",
        )
    points = tuple(KillPoint.parse(text, where="at") for text in at)
    for point in points:
        if point.signal != "SIGKILL":
            raise ConfigurationError(
                "at", found=repr(str(point)), expected="a point without a signal"
            )
    return points


def require_reached(
    points: Sequence[KillPoint], reference: Mapping[int, Sequence[Attempt]], command: str
) -> None:
    """Checks that a run that is killed at these points can be judged.

    Args:
        points: where it will be killed.
        reference: the trace of the uninterrupted run.
        command: named in errors.

    Raises:
        KillPointNotReachedError: the uninterrupted run does not come to one of them.
        ProveError: nothing is saved before the last of them.
    """
    attempts = [attempt for rank in reference.values() for attempt in rank]
    events = {(record.kind, record.step) for record in records_of(attempts)}
    for point in points:
        if (point.event, point.number) not in events:
            steps = [step for kind, step in events if kind == point.event]
            expected = (
                "a run that saves through a Checkpointer; no other run traces its checkpoints"
            )
            if steps:
                expected = f"one from {point.event}:{min(steps)} to {point.event}:{max(steps)}"
            found = f"never reaches {point}"
            raise KillPointNotReachedError(command, found=found, expected=expected)
    saved = first_saved(attempts)
    if saved is not None and not any(point.is_after_save(saved) for point in points):
        raise ProveError(
            command,
            found=f"has no checkpoint yet at {', '.join(map(str, points))}",
            expected="a checkpoint that a killed run can resume from",
            remedy=f"Kill it at checkpoint:{saved} or later, or save more often",
        )


def first_saved(attempts: Sequence[Attempt]) -> int | None:
    """The step of the first checkpoint; None if the trace contains none."""
    return min(steps_of(attempts, CHECKPOINT), default=None)


_POLL_SECONDS = 0.001

# When a launch is killed: at a random instant, or at a chosen point.
Kill = KillInstant | KillPoint


@dataclass(frozen=True)
class Plan:
    """How every run of one command is launched.

    Args:
        command: as the user wrote it.
        world: ranks.
        timeout_seconds: the longest that one launch may take.
        step_seconds: the usual time of a step; scales the instants of kills.
        on_event: called with one line about what happens.
    """

    command: tuple[str, ...]
    world: int
    timeout_seconds: float
    step_seconds: float
    on_event: Callable[[str], None]

    def __str__(self) -> str:
        return " ".join(self.command)


@dataclass(frozen=True)
class FinishedRun:
    """What is left of a run.

    Args:
        trace: the trace of all launches.
        launches: every launch, in order.
        failure: what the failing launch wrote last; empty when none failed.
        num_left_behind: processes that outlived a launch which ended by itself.
    """

    trace: Path
    launches: tuple[LaunchSummary, ...]
    failure: str
    num_left_behind: int


def execute(
    plan: Plan, directory: Path, *, kills: Sequence[Kill] = (), inject: str | None = None
) -> FinishedRun:
    """Launches the command until it ends by itself.

    Args:
        plan: what to launch.
        directory: an absent directory for the run's own files, traces and logs.
        kills: one launch is killed at each of them; a launch that ends before ends the run.
        inject: component keys or slots that are not to be restored.

    Raises:
        CommandTimeoutError: a launch did not end in time; it was killed.
        ConfigurationError: the command cannot be started.
    """
    for name in ("files", "runs", "logs"):
        (directory / name).mkdir(parents=True)
    launches: list[LaunchSummary] = []
    for kill in (*kills, None):
        number = len(launches)
        trace = launch_directory(directory / "trace", number)
        began = time.monotonic()
        point = kill if isinstance(kill, KillPoint) else None
        launch = _start(plan, directory, number, trace, point, inject)
        try:
            was_killed, newest = _watch(plan, launch, TraceTail(trace), kill)
        except BaseException:  # also Ctrl-C: nothing that was started here stays
            launch.kill()
            raise
        status = launch.poll() or 0
        seconds = time.monotonic() - began
        at = None if point is None else str(point)
        launches.append(LaunchSummary(number, newest, was_killed, status, seconds, at))
        if was_killed:
            plan.on_event(f"launch {number}: killed {launches[-1].where}, {seconds:.1f} s")
            continue
        plan.on_event(f"launch {number}: ended with status {status}, {seconds:.1f} s")
        failure = "" if status == 0 else f"exit status {status}: {launch.log_tail()}"
        return FinishedRun(directory / "trace", tuple(launches), failure, launch.clean_up())
    raise AssertionError("the last launch is never killed")


def execute_uninterrupted(plan: Plan, directory: Path) -> FinishedRun:
    """One launch that nobody kills.

    Raises:
        CommandFailedError: the command failed by itself.
        CommandTimeoutError: it did not end in time.
    """
    run = execute(plan, directory)
    if run.failure:
        raise CommandFailedError(str(plan), found=f"failed without being killed, {run.failure}")
    return run


def _start(
    plan: Plan,
    directory: Path,
    number: int,
    trace: Path,
    point: KillPoint | None,
    inject: str | None,
) -> Launch:
    variables = {
        **os.environ,
        TRACE_VARIABLE: str(trace),
        RUN_ROOT_VARIABLE: str(directory / "runs"),
        KILL_VARIABLE: None if point is None else str(point),
        INJECT_VARIABLE: inject,
        "PYTHONUNBUFFERED": "1",
    }
    words = prepared(plan.command, world=plan.world, directory=directory / "files")
    try:
        return Launch(
            words,
            environment={name: text for name, text in variables.items() if text is not None},
            marker=TRACE_VARIABLE,
            log=directory / "logs" / f"launch-{number:05d}.txt",
        )
    except OSError as error:
        raise ConfigurationError(
            words[0], found=f"cannot be started ({error.strerror})", expected="a program"
        ) from error


def _watch(
    plan: Plan, launch: Launch, tail: TraceTail, kill: Kill | None
) -> tuple[bool, int | None]:
    """Whether the launch was killed, and then its newest step; otherwise it ended by itself."""
    deadline = time.monotonic() + plan.timeout_seconds
    while launch.poll() is None:
        newest = tail.poll() if kill is not None else None
        if isinstance(kill, KillInstant) and newest is not None and newest >= kill.step:
            time.sleep(kill.fraction * plan.step_seconds)
            if launch.poll() is None:
                launch.kill()
                return True, tail.poll()
        if _is_at(kill, tail):
            break
        if time.monotonic() > deadline:
            raise CommandTimeoutError(
                str(plan),
                found=f"did not end within {plan.timeout_seconds:.0f} seconds; its last output: "
                f"{launch.log_tail()}",
                remedy="Give it more time (timeout_seconds), or make the training shorter",
            )
        time.sleep(_POLL_SECONDS)
    newest = tail.poll() if kill is not None else None
    if not _is_at(kill, tail):
        return False, None
    # The process that came there killed itself; a launcher and other ranks may live on for a while.
    launch.kill()
    return True, newest


def _is_at(kill: Kill | None, tail: TraceTail) -> bool:
    return isinstance(kill, KillPoint) and (kill.event, kill.number) in tail.events
