"""The likely cause of a difference between a run and its replay, from their journals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from resumekit.prove.causes import Cause, find_causes
from resumekit.record.journal import LOSS, Has, Record
from resumekit.record.moments import of_replay

BATCHES, LAST, BEGIN = 6, 24, 8
ALL = Has.IDS | Has.COUNT | Has.RNG | Has.LR | Has.LOSS


def record(step: int, **changed: Any) -> Record:
    """Other values in each step."""
    plain = Record(
        step,
        ids=step,
        ids_sum=1000 + step,
        rng_torch=step,
        rng_host=step,
        lr_digest=step,
        lr=1 / step,
        loss=2 / step,
        epoch=(step - 1) // BATCHES,
        num_samples=4,
        has=ALL,
    )
    return plain._replace(**changed)


RUN = [record(step) for step in range(1, LAST + 1)]


def replayed(now: Callable[[int], Record]) -> list[Record]:
    return [now(step) for step in range(BEGIN + 1, BEGIN + 7)]


Case = tuple[str, Cause, Callable[[int], Record]]
CASES: list[Case] = [
    ("loss", Cause.UNSAVED_VARIABLE, lambda step: record(step, loss=2.5)),
    ("lr", Cause.LR_CHANGED, lambda step: record(step, lr=2.0)),
    ("lr", Cause.LR_CHANGED, lambda step: record(step, lr_digest=99)),
    (
        *("lr", Cause.LR_RESTARTED),
        lambda step: record(step, lr=1 / (step - BEGIN), lr_digest=step - BEGIN),
    ),
    ("rng", Cause.RNG_LOST, lambda step: record(step, rng_host=99)),
    (
        *("rng", Cause.RNG_RESTARTED),
        lambda step: record(step, rng_host=step - BEGIN, rng_torch=step - BEGIN),
    ),
    ("data", Cause.BATCH_ORDER, lambda step: record(step, ids=99)),
    ("data", Cause.BATCH_SIZE, lambda step: record(step, ids=99, ids_sum=99, num_samples=8)),
    ("data", Cause.ORDER_RESHUFFLED, lambda step: record(step, ids=90 + step, ids_sum=90 + step)),
    (
        *("data", Cause.SAMPLES_SKIPPED),
        lambda step: record(step, ids=step + 1, ids_sum=1001 + step),
    ),
]


@pytest.mark.parametrize(("component", "cause", "now"), CASES, ids=range(len(CASES)))
def test_the_cause_is_named(component: str, cause: Cause, now: Callable[[int], Record]) -> None:
    found = find_causes(*of_replay(RUN, replayed(now), BEGIN))
    assert (found[0].component, found[0].cause) == (component, cause)
    assert found[0].moment.step == BEGIN + 1


@pytest.mark.parametrize("first", [1, 12])
def test_an_identical_replay_has_no_finding(first: int) -> None:
    """Also where the journal has lost its first steps."""
    assert find_causes(*of_replay(RUN[first:], replayed(record), BEGIN)) == ()


def test_a_loss_that_was_recorded_later_is_compared() -> None:
    late = Record(BEGIN + 3, loss=2 / (BEGIN + 3), has=Has.LOSS, kind=LOSS)
    without = [each._replace(has=each.has & ~Has.LOSS) for each in replayed(record)]
    assert find_causes(*of_replay(RUN, [*without, late], BEGIN)) == ()
    (found,) = find_causes(*of_replay(RUN, [*without, late._replace(loss=9.0)], BEGIN))
    assert (found.component, found.moment.step) == ("loss", BEGIN + 3)


def test_the_latest_attempt_of_a_step_counts() -> None:
    run = [*(record(step, loss=7.0) for step in range(1, 12)), *RUN[BEGIN:]]
    assert find_causes(*of_replay(run, replayed(record), BEGIN)) == ()
