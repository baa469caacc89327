"""Ranks that do not agree hear of it on every rank, with the name of who said what."""

from __future__ import annotations

import time

import pytest
from agreement_workloads import (
    SILENT_SECONDS,
    disagree,
    fail_in_two_ways,
    save_by_two_clocks,
    save_slowly,
    schedule_by_rank,
)
from preloads import TORCH

from resumekit.testing import Cell, Kit, Run

PRELOAD = TORCH

SAID = {
    "option": "options save_every: rank 0: 3; rank 1: 4, expected the same on all ranks",
    "component": "components ema: rank 0: nothing; rank 1: ",
    "horizon": "horizon epochs: rank 0: 2; rank 1: 3",
    "directory": "SharedDirectoryError",
    "staging": "this rank does not see what rank 0 has made",
    "step": "steps (all ranks: 2 to 3)",
    "replicas": "model: bias: replicated, but ranks differ (rank 0: ",
}


@pytest.mark.quick("step")
@pytest.mark.parametrize("about", SAID)
def test_a_disagreement_is_reported_on_every_rank(kit: Kit, about: str) -> None:
    run = kit.run_again(kit.new_run(Cell(disagree, {"about": about}, world_size=2)))
    assert run.failure
    for log in logs(run):
        assert SAID[about] in log, log[-2000:]
        assert "resumekit.errors." in log


def test_a_run_with_a_schedule_of_its_own_on_each_rank_resumes(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(schedule_by_rank, {}, world_size=2)))
    assert not run.failure, run.failure


def test_ranks_that_fail_in_different_ways_raise_one_error(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(fail_in_two_ways, {}, world_size=2)))
    assert not run.failure, run.failure


def test_a_rank_that_does_not_answer_is_given_up_after_the_stated_time(kit: Kit) -> None:
    began = time.monotonic()
    run = kit.run_again(kit.new_run(Cell(disagree, {"about": "silence"}, world_size=2)))
    assert SILENT_SECONDS < time.monotonic() - began < 120
    assert "RankLostError: the ranks: one of them does not answer" in logs(run)[0]


@pytest.mark.parametrize(("seconds", "first"), [([100.0, 1e4], 3), ([1e4, 100.0], 2)])
def test_the_clock_of_rank_0_says_when_all_ranks_save(
    kit: Kit, seconds: list[float], first: int
) -> None:
    """The first save is due after 180 s; what rank 0 requests is known to all one step later."""
    run = kit.run_again(kit.new_run(Cell(save_by_two_clocks, {"seconds": seconds}, world_size=2)))
    assert not run.failure, run.failure
    names = sorted(path.name for path in run.directory.glob("training/run/step-*"))
    assert names[0] == f"step-{first:08d}"
    assert names[-1] == "step-00000006"


@pytest.mark.full
def test_a_slow_writer_does_not_end_the_training(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(save_slowly, {"group_seconds": 3}, world_size=2)))
    assert not run.failure, run.failure


def logs(run: Run) -> list[str]:
    return [path.read_text() for path in sorted(run.directory.glob("launch-*.log"))]
