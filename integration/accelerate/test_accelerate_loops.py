"""Accelerate: loops as its examples write them continue exactly when they are killed."""

from __future__ import annotations

from typing import Any

import pytest
from preloads import ACCELERATE

pytest.importorskip("accelerate")

from accelerate_loops_workloads import accumulated, joined, train

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = ACCELERATE
# An epoch has 6 steps on two ranks and 12 on one; the other loader has 8 batches on one.
ROWS: dict[str, tuple[dict[str, Any], int, tuple[int, ...]]] = {
    "a loader made in each epoch": ({"new_loaders": True}, 2, (7, 9)),
    "some batches of an evaluation that shuffles": ({"evaluates": 2}, 2, (8, 17)),
    "an evaluation in the order of its turn": ({"evaluates": 100, "seedable": True}, 1, (17,)),
}


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS)
def test_a_killed_run_continues_exactly(kit: Kit, row: str) -> None:
    options, world_size, steps = ROWS[row]
    kit.assert_exact(Cell(train, options, world_size, tuple(map(KillPoint.step, steps))))


@pytest.mark.parametrize("grows", [False, True])
def test_a_window_that_a_save_falls_into_continues_exactly(kit: Kit, grows: bool) -> None:
    cell = Cell(accumulated, {"grows": grows}, 1, (KillPoint.step(5),))
    kit.assert_exact(cell)
    kit.assert_caught(cell, "callbacks/accelerator")


def test_the_turn_of_an_evaluation_left_out_is_caught_and_named(kit: Kit) -> None:
    cell = Cell(train, {"evaluates": 2}, 2, (KillPoint.step(8),))
    kit.assert_caught(cell, "callbacks/loaders")


def test_ranks_that_wait_for_those_with_more_batches_are_refused_and_named(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(joined, {"num_samples": 40}, 2)))
    assert "batches of an epoch: train: rank 0: 3; rank 1: 2" in run.failure
    kit.assert_exact(Cell(joined, {"num_samples": 48}, 2, (KillPoint.step(2),)))
