"""When to kill: random instants of training progress, spread over the whole run."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from resumekit.errors import ProveError


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
