"""A run of plain PyTorch, forked into DeepSpeed: its shards, and its weights alone."""

from __future__ import annotations

import json

import pytest
from preloads import ALL

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from change_workloads import train

from resumekit.diff import compare_checkpoints
from resumekit.fork import fork_checkpoint
from resumekit.storage.manifest import StepReader
from resumekit.storage.store import Store
from resumekit.testing import Cell, KillPoint, Kit, Run

PRELOAD = ALL


def losses(run: Run) -> dict[int, float]:
    return dict(map(json.loads, (run.directory / "losses.jsonl").read_text().splitlines()))


def newest(run: Run) -> StepReader:
    store = Store(run.directory / "training")
    return store.open_step(store.step_names()[0])


def launched(kit: Kit, run: Run, *, up_to: int) -> Run:
    run = kit.run_again(run, kill=KillPoint.checkpoint(up_to))
    assert not run.failure, run.failure
    return run


@pytest.mark.quick("weights-2")
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("only_weights", [False, True], ids=["all", "weights"])
def test_a_fork_trains_in_a_stage_of_zero_with_the_same_bits(
    kit: Kit, only_weights: bool, stage: int
) -> None:
    source = newest(launched(kit, kit.new_run(Cell(train, {"stage": None})), up_to=6))
    runs = [kit.new_run(Cell(train, {"stage": each})) for each in (None, stage)]
    for number, run in enumerate(runs):
        fork_checkpoint(source, run.directory / "training", only_weights=only_weights)
        runs[number] = launched(kit, run, up_to=8)
    plain, sharded = runs
    assert losses(plain) == losses(sharded)
    found = compare_checkpoints(newest(plain), newest(sharded), components=["model", "optimizer"])
    model, optimizer = found.components
    assert model.is_equal
    assert optimizer.num_tensors > 20
    assert optimizer.tensors == ()
