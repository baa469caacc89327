"""Accelerate: a script that calls ``skip_first_batches`` itself continues exactly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from preloads import ACCELERATE

pytest.importorskip("accelerate")

from accelerate_skips_workloads import train

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = ACCELERATE
# An epoch has 12 steps on one rank and 6 on two, and each fourth is saved.
FEEDS: dict[str, dict[str, Any]] = {
    "a map": {},
    "a map, seedable": {"seedable": True},
    "a map, stateful": {"stateful": True},
    "a map, dispatched": {"dispatch": True},
    "a stream": {"data": "stream"},
    "a stream, dispatched": {"data": "stream", "dispatch": True},
}


@pytest.mark.quick(
    "a map-1-*",
    "a map, stateful-1-second",
    "a map-2-second",
    "a stream-1-first",
    "a stream, dispatched-2-*",
)
@pytest.mark.parametrize("kill", ["first", "second"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("feed", FEEDS)
def test_batches_that_were_used_are_skipped_once(
    kit: Kit, feed: str, world_size: int, kill: str
) -> None:
    epoch = 12 // world_size
    step = epoch - 1 if kill == "first" else 2 * epoch - 3
    kit.assert_exact(Cell(train, FEEDS[feed], world_size, (KillPoint.step(step),)))


def test_killed_in_each_epoch_and_between_two_it_continues_exactly(kit: Kit) -> None:
    kills = (KillPoint.step(6), KillPoint.checkpoint(12), KillPoint.step(21), KillPoint.step(23))
    kit.assert_exact(Cell(train, {}, 1, kills))


@pytest.mark.parametrize("feed", ["a map", "a stream"])
def test_the_state_left_out_is_caught_and_named(kit: Kit, feed: str) -> None:
    kit.assert_caught(Cell(train, FEEDS[feed], 1, (KillPoint.step(6),)), "rng")


@pytest.mark.parametrize("feed", ["a map", "a stream"])
def test_another_number_is_refused_with_both(kit: Kit, feed: str) -> None:
    cell = Cell(train, FEEDS[feed], 1)
    run = kit.run_again(kit.new_run(cell), kill=KillPoint.step(6))
    surplus = replace(cell, options={**FEEDS[feed], "surplus": 1})
    run = kit.run_again(replace(run, cell=surplus))
    assert "train: a loader that skips 5 batches of epoch 0, expected 4, the pos" in run.failure
