"""When the launches of a run are killed: at random instants, or at chosen points."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from resumekit.errors import ConfigurationError, KillPointNotReachedError, ProveError
from resumekit.record.moments import CHECKPOINT, TracedProcess, records_of, steps_of
from resumekit.record.trace import KillPoint


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
    points: Sequence[KillPoint],
    reference: Mapping[int, Sequence[TracedProcess]],
    command: str,
    *,
    saves: Iterable[int] = (),
) -> None:
    """Checks that a run that is killed at these points can be judged.

    Args:
        points: where it will be killed.
        reference: the trace of the uninterrupted run.
        command: named in errors.
        saves: the steps at which it may save, where the uninterrupted run does not.

    Raises:
        KillPointNotReachedError: the uninterrupted run does not come to one of them.
        ProveError: nothing is saved before the last of them.
    """
    attempts = [attempt for rank in reference.values() for attempt in rank]
    events = {(record.kind, record.step) for record in records_of(attempts)}
    events |= {(CHECKPOINT, step) for step in saves}
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
    saved = min((step for kind, step in events if kind == CHECKPOINT), default=None)
    if saved is not None and not any(point.is_after_save(saved) for point in points):
        raise ProveError(
            command,
            found=f"has no checkpoint yet at {', '.join(map(str, points))}",
            expected="a checkpoint that a killed run can resume from",
            remedy=f"Kill it at checkpoint:{saved} or later, or save more often",
        )


def first_saved(attempts: Sequence[TracedProcess]) -> int | None:
    """The step of the first checkpoint; None if the trace contains none."""
    return min(steps_of(attempts, CHECKPOINT), default=None)


# When a launch is killed: at a random instant, or at a chosen point.
Kill = KillInstant | KillPoint
