"""When to kill: at random instants spread over the whole run, or at chosen places."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resumekit.errors import ConfigurationError, PlaceNotReachedError, ProveError
from resumekit.prove.records import CHECKPOINT, Attempt
from resumekit.tracing import KillPlace


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
        first_saved: the step of the first checkpoint, where the trace tells.
        rng: decides.

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
    places = [rng.uniform(part * width, (part + 1) * width) for part in range(num_kills)]
    if places and places[-1] < saved:
        places[-1] = rng.uniform(min(saved, num_gaps - 1), num_gaps)
    # uniform() may give its upper bound, and behind the last step there is nothing to kill.
    places = [min(place, num_gaps - 1e-6) for place in places]
    return tuple(KillInstant(steps[int(place)], place % 1.0) for place in places)


def chosen_places(
    at: Sequence[str], *, kills: int | None, seed: int | None
) -> tuple[KillPlace, ...]:
    """The places that a user named; empty when the kills are to be random.

    Raises:
        ConfigurationError: one is not a place, or random kills were asked for as well.
    """
    if at and (kills is not None or seed is not None):
        raise ConfigurationError(
            "at",
            found=f"given together with {'seed' if kills is None else 'kills'}",
            expected="either chosen places or random instants",
        )
    places = tuple(KillPlace.parse(text, where="at") for text in at)
    for place in places:
        if place.signal != "SIGKILL":
            raise ConfigurationError("at", found=repr(str(place)), expected="a place alone")
    return places


def require_reached(
    places: Sequence[KillPlace], reference: Mapping[int, Sequence[Attempt]], command: str
) -> None:
    """Nothing, when a run that is killed at these places can be judged.

    Args:
        places: where it will be killed.
        reference: the trace of the uninterrupted run.
        command: named in errors.

    Raises:
        PlaceNotReachedError: the uninterrupted run does not come to one of them.
        ProveError: nothing is saved before the last of them.
    """
    attempts = [attempt for rank in reference.values() for attempt in rank]
    events = {(record.kind, record.step) for attempt in attempts for record in attempt.records}
    for place in places:
        if (place.event, place.step) not in events:
            steps = [step for kind, step in events if kind == place.event]
            expected = "a run that saves through a Checkpointer; no other tells of its checkpoints"
            if steps:
                expected = f"one from {place.event}:{min(steps)} to {place.event}:{max(steps)}"
            raise PlaceNotReachedError(command, found=f"never comes to {place}", expected=expected)
    saved = first_saved(attempts)
    if saved is not None and not any(place.is_behind(saved) for place in places):
        raise ProveError(
            command,
            found=f"has saved nothing when it comes to {', '.join(map(str, places))}",
            expected="a checkpoint that a killed run can resume from",
            remedy=f"Kill it at checkpoint:{saved} or later, or save more often",
        )


def first_saved(attempts: Sequence[Attempt]) -> int | None:
    """The step of the first checkpoint, where the trace tells."""
    steps = [r.step for attempt in attempts for r in attempt.records if r.kind == CHECKPOINT]
    return min(steps, default=None)
