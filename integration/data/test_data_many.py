"""Several loaders, changing loaders, saves in an accumulation window: killed, the same bits."""

from __future__ import annotations

from typing import Any

import pytest
from many_workloads import accumulate, accumulate_with_accelerate, train
from preloads import ALL

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = ALL
STEP, CHECKPOINT = KillPoint.step, KillPoint.checkpoint

# Where each loop is killed: inside its first epoch, at a boundary, and later.
KILLS: dict[str, tuple[KillPoint, ...]] = {
    "zipped": (STEP(5), CHECKPOINT(6), STEP(11)),
    "repeated": (STEP(5), CHECKPOINT(6), STEP(11)),
    "phases": (STEP(4), CHECKPOINT(4), STEP(9), CHECKPOINT(10), STEP(15)),
    "rebuilt": (STEP(3), CHECKPOINT(4), STEP(9), CHECKPOINT(10), STEP(15)),
    "endless": (STEP(4), CHECKPOINT(6), STEP(12)),
}


def cell(loop: str, *, world_size: int = 1, kills: Any = None, **options: Any) -> Cell:
    kills = KILLS[loop] if kills is None else kills
    return Cell(train, {"loop": loop, **options}, world_size, kills)


@pytest.mark.quick("repeated")
@pytest.mark.parametrize("loop", KILLS)
def test_a_loop_that_is_killed_again_and_again_ends_with_the_same_bits(kit: Kit, loop: str) -> None:
    kit.assert_exact(cell(loop))


@pytest.mark.full
@pytest.mark.parametrize("loop", ["zipped", "repeated", "rebuilt"])
def test_with_persistent_workers_too(kit: Kit, loop: str) -> None:
    kit.assert_exact(cell(loop, workers="persistent"))


@pytest.mark.quick("zipped-kills0")
@pytest.mark.parametrize(
    ("loop", "kills"),
    [
        ("zipped", (STEP(2), CHECKPOINT(4))),
        ("repeated", (STEP(2), CHECKPOINT(4))),
        ("phases", (CHECKPOINT(2), STEP(7))),
    ],
)
def test_on_two_ranks_too(kit: Kit, loop: str, kills: tuple[KillPoint, ...]) -> None:
    kit.assert_exact(cell(loop, world_size=2, kills=kills))


@pytest.mark.quick("repeated-data")
@pytest.mark.parametrize("component", ["data", "rng", "progress"])
@pytest.mark.parametrize("loop", ["zipped", "repeated"])
def test_a_component_left_out_is_caught_and_named(kit: Kit, loop: str, component: str) -> None:
    kit.assert_caught(cell(loop, kills=(STEP(5),)), component)


# ---------------------------------------------------------------- in an accumulation window

# Step 2 is saved after micro-batch 10, inside its accumulation window and at an epoch's end.
WITHIN = (CHECKPOINT(1), STEP(3), CHECKPOINT(3))


@pytest.mark.quick("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_kill_inside_a_window_is_exact(kit: Kit, world_size: int) -> None:
    kit.assert_exact(Cell(accumulate, {}, world_size, WITHIN))


@pytest.mark.full
def test_with_gradients_that_are_views_of_the_buckets_too(kit: Kit) -> None:
    kit.assert_exact(Cell(accumulate, {"bucket_view": True}, 2, WITHIN))


@pytest.mark.quick("1")
@pytest.mark.parametrize("world_size", [1, 2])
def test_without_the_gradients_it_is_caught_and_named(kit: Kit, world_size: int) -> None:
    kit.assert_caught(Cell(accumulate, {}, world_size, (STEP(2),)), "model/gradients")


@pytest.mark.full
def test_by_default_the_same_saves_are_made_between_windows(kit: Kit) -> None:
    options = {"mid_accumulation": "boundary"}
    kit.assert_exact(Cell(accumulate, options, 1, (CHECKPOINT(1), STEP(3))))


@pytest.mark.full
@pytest.mark.parametrize("world_size", [1, 2])
def test_accelerates_windows_need_no_code_of_their_own(kit: Kit, world_size: int) -> None:
    kills = (CHECKPOINT(1), STEP(3), CHECKPOINT(4))
    kit.assert_exact(Cell(accumulate_with_accelerate, {}, world_size, kills))


@pytest.mark.full
def test_in_accelerates_windows_too_they_are_missed(kit: Kit) -> None:
    cell = Cell(accumulate_with_accelerate, {}, 1, (STEP(2),))
    kit.assert_caught(cell, "model/gradients")
