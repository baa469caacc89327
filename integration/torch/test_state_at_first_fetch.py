"""Killed inside an epoch, a run does not repeat what it changed before that epoch's first batch."""

from __future__ import annotations

import re
from typing import Any

import pytest
from first_fetch_workloads import train_accelerate, train_deepspeed, train_fabric, train_torch
from preloads import ALL

from resumekit.testing import Cell, KillPoint, Kit, Run

PRELOAD = ALL

# Inside an epoch of eight steps, inside the next one, and one step after that resume; saves at 5,
# 10, 15 and 20.
KILLS = (KillPoint.step(7), KillPoint.step(13), KillPoint.step(11))

CELLS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "plain": (train_torch, {"layout": "plain"}, 1),
    "ddp": (train_torch, {"layout": "ddp"}, 2),
    "ddp, one rank": (train_torch, {"layout": "ddp", "change": "one rank"}, 2),
    "fsdp": (train_torch, {"layout": "fsdp"}, 2),
    "fsdp, one rank": (train_torch, {"layout": "fsdp", "change": "one rank"}, 2),
    "fsdp1": (train_torch, {"layout": "fsdp1"}, 2),
    "accelerate": (train_accelerate, {}, 1),
    "fabric": (train_fabric, {}, 1),
    "zero-0": (train_deepspeed, {"stage": 0}, 1),
    "zero-1": (train_deepspeed, {"stage": 1}, 2),
    "zero-2 in bf16": (train_deepspeed, {"stage": 2, "precision": "bf16"}, 2),
    "zero-3 in bf16": (train_deepspeed, {"stage": 3, "precision": "bf16"}, 2),
    "zero-1, loads itself": (train_deepspeed, {"stage": 1, "loads_itself": True}, 2),
}
NAMES = pytest.mark.parametrize("name", list(CELLS))


def cell_of(name: str, **options: Any) -> Cell:
    function, given, world_size = CELLS[name]
    for framework in ("accelerate", "lightning", "deepspeed"):
        if framework[:6] in function.__name__ or (name, framework) == ("fabric", "lightning"):
            pytest.importorskip(framework)
    return Cell(function, {**given, **options}, world_size, KILLS)


def lines_of(run: Run) -> list[str]:
    """What each launch has logged of state that was restored again, by rank 0."""
    logs = sorted(run.directory.glob("launch-*-rank-00000.log"))
    found = [re.findall("restored again: (.*) \\(", log.read_text()) for log in logs]
    return [", ".join(each) for each in found]


@pytest.mark.quick("plain", "ddp, one rank", "fsdp, one rank", "zero-2 in bf16")
@NAMES
def test_a_killed_run_changes_its_state_once(kit: Kit, name: str) -> None:
    kit.assert_exact(cell_of(name))


@pytest.mark.quick("ddp", "zero-3 in bf16")
@NAMES
def test_an_evaluation_before_the_first_batch_restores_nothing_again(kit: Kit, name: str) -> None:
    run = kit.run_killed(cell_of(name, change="nothing"))
    assert not run.failure
    assert lines_of(run) == [""] * (len(KILLS) + 1)


def test_a_change_of_one_rank_is_found_by_all(kit: Kit) -> None:
    run = kit.run_killed(cell_of("ddp, one rank"))
    assert not run.failure
    assert lines_of(run) == ["", *["model, model/rank_buffers, model/gradient_buckets"] * 3]


@pytest.mark.quick("ddp, one rank")
@NAMES
def test_control_without_the_second_restore_it_differs(kit: Kit, name: str) -> None:
    verdict, run = kit.judge(cell_of(name, is_restored=False))
    assert not run.failure
    assert verdict.divergence is not None
