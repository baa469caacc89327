"""Killed by SIGKILL and started again with other workers, a run with keys ends with the same bits.

The uninterrupted run of a cell has the workers of its first launch; each launch after a kill has
others, and another seed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from keyed_workloads import train, train_accelerate, train_trainer
from preloads import ALL

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = ALL

# Twelve steps an epoch, saves at every third: in the first epoch, near its end, in the second.
KILLS = (KillPoint.step(5), KillPoint.step(11), KillPoint.checkpoint(15))
FRESH = ["0", "2", "4", "1"]
PERSISTENT = ["2 persistent", "0", "3 persistent", "1"]


def cell(
    function: Callable[..., Any] = train,
    *,
    workers: list[str] = FRESH,
    world_size: int = 1,
    **options: Any,
) -> Cell:
    return Cell(function, {"workers": workers, **options}, world_size, KILLS[: len(workers) - 1])


@pytest.mark.full
def test_with_the_tape_a_run_whose_workers_change_ends_elsewhere(kit: Kit) -> None:
    kit.assert_exact(cell(workers=["2", "2"], randomness="tape"))
    verdict, run = kit.judge(cell(workers=["2", "4"], randomness="tape"))
    assert not run.failure
    assert not verdict.exact


@pytest.mark.quick("whole batches")
@pytest.mark.parametrize("feed", ["shuffle", "generator", "replacement", "whole batches"])
def test_with_keys_it_ends_with_the_same_bits(kit: Kit, feed: str) -> None:
    kit.assert_exact(cell(feed=feed))


@pytest.mark.full
def test_persistent_workers_may_come_and_go(kit: Kit) -> None:
    kit.assert_exact(cell(workers=PERSISTENT, feed="collate"))


@pytest.mark.full
def test_processes_may_be_started_in_any_way(kit: Kit) -> None:
    kit.assert_exact(cell(workers=["0", "1 persistent spawn", "1 persistent forkserver"]))


@pytest.mark.quick("train")
@pytest.mark.parametrize("function", [train, train_accelerate])
def test_every_rank_continues(kit: Kit, function: Callable[..., Any]) -> None:
    workers = ["0", "2", "1 persistent"]
    kit.assert_exact(cell(function, workers=workers, world_size=2, save_every=2))


@pytest.mark.full
@pytest.mark.parametrize("function", [train_accelerate, train_trainer])
def test_loaders_that_are_a_batch_ahead_continue(kit: Kit, function: Callable[..., Any]) -> None:
    kit.assert_exact(cell(function, workers=["0", "2 persistent", "1"]))


@pytest.mark.quick("data/seed")
@pytest.mark.parametrize("component", ["data/seed", "data", "rng"])
def test_a_part_left_out_is_caught_and_named(kit: Kit, component: str) -> None:
    kit.assert_caught(cell(workers=["0", "2"]), component)
