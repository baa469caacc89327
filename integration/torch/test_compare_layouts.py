"""Checkpoints of one state in several layouts are equal, whichever ranks wrote which part."""

from __future__ import annotations

from dataclasses import replace

import pytest
from preloads import TORCH
from resave_workload import resave
from sharded_workloads import take_over

from resumekit.diff import CheckpointDifference, compare_checkpoints
from resumekit.storage.store import Store
from resumekit.testing import Cell, Kit, Run

PRELOAD = TORCH
SHARDED = ("model", "optimizer")


def resaved(kit: Kit, *cells: Cell) -> CheckpointDifference:
    """The newest checkpoint and the one before it, after some launches of one run."""
    run: Run | None = None
    trained = Cell(take_over, {"layout": "plain", "num_beyond": 0}, 1)
    for cell in (trained, *cells):
        run = kit.run_again(kit.new_run(cell) if run is None else replace(run, cell=cell))
        assert not run.failure, run.failure
    assert run is not None
    store = Store(run.directory / "training")
    newest, before, *_ = store.step_names()
    readers = store.open_step(before), store.open_step(newest)
    return compare_checkpoints(*readers, components=SHARDED)


@pytest.mark.quick("fsdp-2", "tp-2")
@pytest.mark.parametrize(
    ("layout", "num_ranks"), [("fsdp", 2), ("tp", 2), ("fsdp1", 2), ("ddp", 2), ("fsdp x tp", 4)]
)
def test_sharded_state_equals_that_of_one_process(kit: Kit, layout: str, num_ranks: int) -> None:
    found = resaved(kit, Cell(resave, {"layout": layout}, num_ranks))
    assert (found.first.world_size, found.second.world_size) == (1, num_ranks)
    assert [each for each in found.components if not each.is_equal] == []
    assert sum(component.num_tensors for component in found.components) > 30


def test_one_element_of_one_shard_is_found(kit: Kit) -> None:
    sharded = Cell(resave, {"layout": "fsdp"}, 2)
    found = resaved(kit, sharded, Cell(resave, {"layout": "plain", "changed": True}, 1))
    model, optimizer = found.components[:2]
    assert optimizer.is_equal
    (difference,) = model.tensors
    assert difference.name == "head.bias"
    assert difference.elements is not None
    assert (difference.elements.num_different, difference.elements.max_ulp) == (1, 1)
