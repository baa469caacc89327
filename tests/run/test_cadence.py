"""When a save is due, and which interval ``save_every="auto"`` chooses from what saves cost."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.cadence import (
    BACKGROUND_SHARE,
    FIRST_SAVE_SECONDS,
    MAX_COST_SHARE,
    MAX_INTERVAL_SECONDS,
    MIN_INTERVAL_SECONDS,
    SaveInterval,
    parse_cadence,
)
from resumekit.errors import ConfigurationError
from resumekit.log import logger
from resumekit.storage.store import Store

HOUR = 3600.0
DAY = 24 * HOUR

costs = st.floats(0.0, 1e5)
mtbfs = st.floats(1.0, 1e9)

# ---------------------------------------------------------------- the interval


@pytest.mark.parametrize(
    ("cost", "mtbf", "seconds"),
    [
        (0.5, 10_000.0, 100.0),  # sqrt(2 * 0.5 * 10000)
        (1.0, DAY, 415.692),  # sqrt(172800)
        (2.0, HOUR, 200.0),  # sqrt(14400) is 120; 1% allows every 200
        (0.0, DAY, MIN_INTERVAL_SECONDS),
        (0.0001, DAY, MIN_INTERVAL_SECONDS),  # sqrt(17.28) is 4.2
        (17.28, DAY, 1728.0),  # where both rules give the same
        (18.0, DAY, 1800.0),  # sqrt(3110400) is 1763.6; 100 * 18
        (30.0, DAY, MAX_INTERVAL_SECONDS),  # sqrt(5184000) is 2277
    ],
)
def test_the_interval_is_that_of_young_and_daly_within_its_limits(
    cost: float, mtbf: float, seconds: float
) -> None:
    assert SaveInterval(cost, mtbf).seconds == pytest.approx(seconds, abs=1e-3)


def test_the_interval_minimises_what_is_lost() -> None:
    """Saves take cost / interval, a failure repeats half an interval each mtbf."""
    cost, mtbf = 1.0, DAY
    best = SaveInterval(cost, mtbf).seconds

    def lost(interval: float) -> float:
        return cost / interval + interval / 2 / mtbf

    assert all(lost(best) < lost(best * factor) for factor in (0.5, 0.9, 1.1, 2.0))


@given(cost=costs, mtbf=mtbfs)
def test_the_limits_hold_for_any_cost(cost: float, mtbf: float) -> None:
    interval = SaveInterval(cost, mtbf)
    assert MIN_INTERVAL_SECONDS <= interval.seconds <= MAX_INTERVAL_SECONDS
    assert interval.is_expensive == (cost > MAX_COST_SHARE * MAX_INTERVAL_SECONDS * (1 + 1e-9))
    assert interval.is_expensive or interval.cost_share <= MAX_COST_SHARE * (1 + 1e-9)
    assert not interval.is_expensive or interval.seconds == MAX_INTERVAL_SECONDS


@given(cost=costs, more=costs, mtbf=mtbfs, longer=mtbfs)
def test_a_dearer_save_and_a_rarer_failure_never_shorten_the_interval(
    cost: float, more: float, mtbf: float, longer: float
) -> None:
    seconds = SaveInterval(cost, mtbf).seconds
    assert SaveInterval(cost + more, mtbf).seconds >= seconds
    assert SaveInterval(cost, mtbf + longer).seconds >= seconds


@pytest.mark.parametrize(
    ("cost", "text"),
    [
        (1.0, "every 6.9 min; a save costs 1 s or 0.24% of the training time, mtbf 24 h"),
        (0.01, "every 42 s; a save costs 10 ms or 0.02% of the training time, mtbf 24 h"),
        (
            38.0,
            "every 30 min, the longest interval; a save costs 38 s or 2.11% of the training time, "
            "mtbf 24 h",
        ),
    ],
)
def test_an_interval_says_why(cost: float, text: str) -> None:
    assert str(SaveInterval(cost, DAY)) == text


# ---------------------------------------------------------------- the cadence


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test sets: ``clock.now += 5``."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr("resumekit.cadence.time", clock)
    monkeypatch.setattr("resumekit.run.due_saves.time", clock)
    return clock


def test_the_first_save_comes_early_and_its_cost_gives_the_interval(clock: SimpleNamespace) -> None:
    cadence = parse_cadence("auto")
    assert str(cadence) == "automatically, first after 3 min"
    assert cadence.needs_agreement
    clock.now += FIRST_SAVE_SECONDS - 1
    assert not cadence.is_due(7)
    clock.now += 1
    assert cadence.is_due(7)
    cadence.saved(blocked_seconds=1.0)
    assert cadence.chosen == SaveInterval(1.0, DAY)
    clock.now += 415
    assert not cadence.is_due(8)
    clock.now += 1
    assert cadence.is_due(8)


def test_a_failed_save_begins_the_interval_and_has_no_cost(clock: SimpleNamespace) -> None:
    cadence = parse_cadence("auto")
    clock.now += FIRST_SAVE_SECONDS
    cadence.restart()
    assert cadence.chosen is None
    assert not cadence.is_due(7)
    clock.now += FIRST_SAVE_SECONDS
    assert cadence.is_due(8)


def test_the_cost_is_the_mean_of_the_last_saves_with_a_share_of_the_background() -> None:
    cadence = parse_cadence("auto", "48h")
    for blocked in (100.0, 1.0, 2.0, 3.0, 4.0):
        cadence.saved(blocked_seconds=blocked)
    assert cadence.chosen == SaveInterval(22.0, 2 * DAY)
    cadence.saved(blocked_seconds=1.0, background_seconds=16.0)
    assert cadence.chosen == SaveInterval((11.0 + 16.0 * BACKGROUND_SHARE) / 5, 2 * DAY)


@pytest.mark.parametrize("save_every", [500, "10min", None])
def test_without_auto_no_cost_changes_the_cadence(
    save_every: int | str | None, clock: SimpleNamespace
) -> None:
    cadence = parse_cadence(save_every)
    before = str(cadence)
    cadence.saved(blocked_seconds=100.0, background_seconds=100.0)
    assert cadence.chosen is None
    assert str(cadence) == before


@pytest.mark.parametrize(
    ("seconds", "other", "differs"),
    [(100, 124, False), (100, 126, True), (100, 76, False), (100, 74, True)],
)
def test_an_interval_differs_by_more_than_a_quarter(
    seconds: float, other: float, differs: bool
) -> None:
    def interval(seconds: float) -> SaveInterval:
        return SaveInterval(seconds**2 / 2 / DAY, DAY)

    assert interval(other).differs_from(interval(seconds)) is differs
    assert interval(other).differs_from(None)


@pytest.mark.parametrize("mtbf", ["", "0h", "day", "-1h", 24, None])
def test_an_mtbf_that_is_no_duration_is_refused(mtbf: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'mtbf: .*, expected a duration such as "24h"'):
        parse_cadence(10, mtbf)


# ---------------------------------------------------------------- a run


class Costs:
    """Extra state of which each save takes some seconds of the clock.

    Args:
        clock: to advance.
        seconds: of the saves, one after the other; the last for all that follow.
    """

    def __init__(self, clock: SimpleNamespace, *seconds: float) -> None:
        self._clock = clock
        self._seconds = list(seconds)

    def state_dict(self) -> dict[str, Any]:
        self._clock.now += self._seconds[0]
        if len(self._seconds) > 1:
            del self._seconds[0]
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is restored."""


@pytest.fixture
def logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """What the logger gets, which hands nothing to the root logger."""
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    yield caplog
    logger.setLevel(level)


def make(directory: Path, clock: SimpleNamespace, *costs: float, **options: Any) -> Checkpointer:
    model = nn.Linear(2, 1)
    return Checkpointer(
        directory,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        extras={"costs": Costs(clock, *costs)},
        **{"save_every": "auto", **options},
    )


def saved_steps(
    directory: Path, clock: SimpleNamespace, *costs: float, **options: Any
) -> list[int]:
    """The steps that a run of 400 steps of 30 seconds saves."""
    checkpointer = make(directory, clock, *costs, keep_latest=None, **options)
    steps = []
    with checkpointer:
        newest = None
        for _ in checkpointer.batches(DataLoader(TensorDataset(torch.zeros(400, 2))), epochs=1):
            names = Store(directory).step_names()
            if names and names[0] != newest:
                newest = names[0]
                steps.append(newest.step)
            clock.now += 30.0
            checkpointer.step()
    return steps


def interval_lines(logged: pytest.LogCaptureFixture, level: int) -> list[str]:
    found = [each.getMessage() for each in logged.records if each.levelno == level]
    return [line for line in found if line.startswith("saves every")]


def test_a_run_saves_early_and_then_at_the_interval_of_its_costs(
    tmp_path: Path, clock: SimpleNamespace, logged: pytest.LogCaptureFixture
) -> None:
    steps = saved_steps(tmp_path, clock, 1.0)
    # 180 s are 6 steps; every 415.7 s are 14.
    assert steps == list(range(6, 400, 14))
    text = "every 6.9 min; a save costs 1 s or 0.24% of the training time, mtbf 24 h"
    assert interval_lines(logged, logging.DEBUG) == [f"saves {text}"]
    assert not interval_lines(logged, logging.INFO)
    start = next(each.getMessage() for each in logged.records if each.levelno == logging.INFO)
    assert "; saves automatically, first after 3 min; " in start
    store = Store(tmp_path)
    newest, *_, first = store.step_names()
    assert store.open_step(newest).manifest.details["saves"] == text
    assert "saves" not in store.open_step(first).manifest.details


def test_a_rarer_failure_makes_saves_rarer(tmp_path: Path, clock: SimpleNamespace) -> None:
    steps = saved_steps(tmp_path, clock, 1.0, mtbf="96h")
    assert steps == list(range(6, 400, 28))  # 831 s


def test_an_expensive_save_is_made_every_30_minutes_and_its_cost_is_logged_once(
    tmp_path: Path, clock: SimpleNamespace, logged: pytest.LogCaptureFixture
) -> None:
    steps = saved_steps(tmp_path, clock, 45.0)
    assert steps == list(range(6, 400, 60))
    assert interval_lines(logged, logging.INFO) == [
        "saves every 30 min, the longest interval; a save costs 45 s or 2.5% of the training time, "
        "mtbf 24 h"
    ]


def test_a_changed_cost_is_logged_when_it_changes_the_interval_by_a_quarter(
    tmp_path: Path, clock: SimpleNamespace, logged: pytest.LogCaptureFixture
) -> None:
    saved_steps(tmp_path, clock, *[1.0] * 3, *[1.1] * 9, 9.0)
    lines = [line.partition(" or ")[0] for line in interval_lines(logged, logging.DEBUG)]
    assert lines == [
        "saves every 6.9 min; a save costs 1 s",
        "saves every 11 min; a save costs 2.7 s",
        "saves every 14 min; a save costs 4.3 s",
        "saves every 19 min; a save costs 7.4 s",
    ]


def test_a_save_on_request_is_measured_as_well(tmp_path: Path, clock: SimpleNamespace) -> None:
    checkpointer = make(tmp_path, clock, 2.0)
    checkpointer.save()
    cadence = checkpointer._loop.saves._cadence
    checkpointer.close()
    assert cadence.chosen == SaveInterval(2.0, DAY)


def test_without_auto_a_run_says_nothing_of_an_interval(
    tmp_path: Path, clock: SimpleNamespace, logged: pytest.LogCaptureFixture
) -> None:
    steps = saved_steps(tmp_path, clock, 45.0, save_every="10min")
    assert steps == list(range(20, 400, 20))
    assert not interval_lines(logged, logging.INFO) + interval_lines(logged, logging.DEBUG)
    assert (
        "saves" not in Store(tmp_path).open_step(Store(tmp_path).step_names()[0]).manifest.details
    )


class Rank:
    """Stands for the world of one of two ranks, of which the other requests nothing."""

    world_size = 2

    def __init__(self, rank: int) -> None:
        self.rank, self.is_first = rank, rank == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_the_clock_of_rank_0_counts(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    checkpointer = make(tmp_path, clock, 1.0)
    monkeypatch.setattr(checkpointer._run, "world", Rank(rank))
    clock.now += FIRST_SAVE_SECONDS
    assert checkpointer._loop.saves.exchange(0).save == (rank == 0)
