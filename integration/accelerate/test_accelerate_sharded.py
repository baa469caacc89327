"""Accelerate with FSDP2 and with the DeepSpeed plugin: killed, it continues with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import require_independent_copy
from frozen_backbone import require_exact_and_linked
from preloads import ALL

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")

from accelerate_sharded_workloads import train, two_engines

from resumekit.prove import compare
from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = ALL
KILLS = {
    "mid-epoch 0": (KillPoint.step(4),),
    "on the boundary": (KillPoint.checkpoint(6),),
    "twice in one epoch": (KillPoint.step(8), KillPoint.step(11)),
}


@pytest.mark.quick("FSDP1-mid-epoch 0", "FSDP2-twice in one epoch", "ZeRO-2-on the boundary")
@pytest.mark.parametrize("kill", KILLS)
@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP2", "ZeRO-2"])
def test_a_killed_run_continues_exactly(kit: Kit, sharding: str, kill: str) -> None:
    kit.assert_exact(Cell(train, {"sharding": sharding}, 2, KILLS[kill]))


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {"sharding": "FSDP2", "accumulate": 2, "augment": True, "save_every": 1},
        {"sharding": "FSDP2", "average": True, "mark": False},
        {"sharding": "FSDP1", "accumulate": 2, "augment": True, "mark": False, "save_every": 1},
        {"sharding": "ZeRO-1", "average": True},
        {"sharding": "ZeRO-2", "accumulate": 2, "mark": False, "save_every": 1},
        # deepspeed 0.19 zero/partition_parameters.py leaves what is beyond the last rank's part of
        # an odd number as it finds it in memory, which is not the same in two runs.
        {"sharding": "ZeRO-3", "augment": True, "width": 34},
    ],
    ids=str,
)
def test_every_way_to_train_continues_exactly(kit: Kit, options: dict[str, Any]) -> None:
    kit.assert_exact(Cell(train, options, 2, (KillPoint.step(2), KillPoint.step(5))))


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP2", "ZeRO-2"])
def test_what_changes_after_a_save_in_the_background_is_not_in_the_checkpoint(
    kit: Kit, sharding: str
) -> None:
    options = {"sharding": sharding, "average": sharding == "FSDP2"}
    require_independent_copy(kit, Cell(train, options, 2), step=3)


@pytest.mark.full
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP2", "ZeRO-2"])
def test_frozen_parameters_are_linked_and_continue_exactly(
    kit: Kit, sharding: str, async_save: bool
) -> None:
    options = {"sharding": sharding, "frozen": True, "async_save": async_save, "save_every": 1}
    require_exact_and_linked(kit, Cell(train, options, 2, (KillPoint.step(4), KillPoint.step(8))))


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["FSDP2", "ZeRO-2"])
def test_a_run_that_saves_by_save_state_continues_exactly(kit: Kit, sharding: str) -> None:
    options = {"sharding": sharding, "states": True}
    kit.assert_exact(Cell(train, options, 2, (KillPoint.step(4), KillPoint.step(8))))


@pytest.mark.quick("FSDP2-optimizer")
@pytest.mark.parametrize("component", ["model", "optimizer", "lr_scheduler", "ema", "rng", "data"])
@pytest.mark.parametrize("sharding", ["FSDP2", "ZeRO-2"])
def test_a_component_left_out_is_caught_and_named(kit: Kit, sharding: str, component: str) -> None:
    options = {"sharding": sharding, "average": True}
    kit.assert_caught(Cell(train, options, 2, (KillPoint.step(5),)), component)


@pytest.mark.quick("optimizer")
@pytest.mark.parametrize("component", ["model", "optimizer"])
def test_a_component_of_fsdp1_left_out_is_caught_and_named(kit: Kit, component: str) -> None:
    kit.assert_caught(Cell(train, {"sharding": "FSDP1"}, 2, (KillPoint.step(5),)), component)


@pytest.mark.full
@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP2", "ZeRO-2"])
def test_a_window_that_the_framework_keeps_to_itself_is_refused_and_named(
    kit: Kit, sharding: str
) -> None:
    options = {"sharding": sharding, "mid_accumulation": "gradients"}
    run = kit.run_again(kit.new_run(Cell(train, options, 2)))
    assert "ConfigurationError: mid_accumulation: 'gradients', and" in run.failure


def test_a_second_engine_is_refused_and_named(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(two_engines, {}, 2)))
    assert "ConfigurationError: accelerator: more than one DeepSpeed engine" in run.failure


@pytest.mark.full
@pytest.mark.parametrize(("before", "after"), [("FSDP2", "FSDP2"), ("FSDP1", "FSDP2")])
def test_another_number_of_ranks_takes_the_parts_over(kit: Kit, before: str, after: str) -> None:
    first, then = Cell(train, {"sharding": before}, 2), Cell(train, {"sharding": after}, 3)
    run = kit.run_again(kit.new_run(first), kill=KillPoint.checkpoint(6))
    run = kit.run_again(replace(run, cell=then))
    assert not run.failure, run.failure
    log = (run.directory / "launch-00001-rank-00000.log").read_text(encoding="utf-8")
    assert "resuming at step 6" in log
    assert "number of ranks was 2, now 3" in log


@pytest.mark.full
def test_damage_to_one_ranks_part_sends_all_ranks_to_the_checkpoint_before(kit: Kit) -> None:
    cell = Cell(train, {}, 2)
    run = kit.run_again(kit.new_run(cell), kill=KillPoint.step(8))
    path = Path(run.directory, "training/step-00000006/model/rank-00001.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    run = kit.run_again(run)
    assert not run.failure, run.failure
    verdict = compare(kit.run_uninterrupted(cell).trace, run.trace, expect_resume=True)
    assert verdict.exact, str(verdict)
    assert [resume.step for resume in verdict.resumes] == [3]
