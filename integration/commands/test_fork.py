"""Forked runs, killed and resumed, against the run they come from; the script notes its losses."""

from __future__ import annotations

from typing import Any

import pytest
from preloads import ALL

pytest.importorskip("accelerate")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

from fork_workloads import NUM_STEPS, train

from resumekit.diff import compare_checkpoints
from resumekit.fork import fork_checkpoint
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import StepReader, lineage_of
from resumekit.storage.store import Store
from resumekit.testing import Cell, KillPoint, Kit, Run

PRELOAD = ALL
FRAMEWORKS = ("torch", "accelerate", "trainer", "lightning")


def cell(framework: str, **options: Any) -> Cell:
    return Cell(train, {"framework": framework, **options})


def losses(run: Run) -> list[str]:
    """What the model noted, step by step."""
    return (run.directory / "losses.txt").read_text().split()


def checkpoint(run: Run, step: int) -> StepReader:
    return Store(run.directory / "training").open_step(StepName(step))


def launched(kit: Kit, run: Run, *kills: KillPoint) -> Run:
    """The run after a launch for each kill, and one to the end."""
    for kill in (*kills, None):
        run = kit.run_again(run, kill=kill)
        assert not run.failure, run.failure
    assert not run.missed_kills
    return run


def forked(kit: Kit, source: StepReader, wanted: Cell, *, only_weights: bool = False) -> Run:
    """A run that has not been launched, and begins from this checkpoint."""
    run = kit.new_run(wanted)
    fork_checkpoint(source, run.directory / "training", only_weights=only_weights)
    return run


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_fork_that_is_killed_continues_as_the_original_did(kit: Kit, framework: str) -> None:
    original = kit.run_uninterrupted(cell(framework))
    assert len(losses(original)) == NUM_STEPS
    run = forked(kit, checkpoint(original, 4), cell(framework, seed=9))
    run = launched(kit, run, KillPoint.checkpoint(8))
    assert losses(run) == losses(original)[4:]
    found = compare_checkpoints(checkpoint(original, NUM_STEPS), checkpoint(run, NUM_STEPS))
    assert found.is_equal
    (origin,) = lineage_of(checkpoint(run, NUM_STEPS).manifest)
    assert origin.run_id == checkpoint(original, 4).manifest.run_id


def test_a_fork_of_another_step_does_not(kit: Kit) -> None:
    original = kit.run_uninterrupted(cell("torch"))
    run = launched(kit, forked(kit, checkpoint(original, 6), cell("torch")))
    assert losses(run) == losses(original)[6:]
    assert losses(run)[:6] != losses(original)[4:10]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_weights_alone_are_where_a_new_training_starts(kit: Kit, framework: str) -> None:
    source = checkpoint(kit.run_uninterrupted(cell(framework)), 8)
    weights = str(source.path / "model" / "rank-00000.safetensors")
    expected = kit.run_uninterrupted(cell(framework, seed=5, weights=weights))
    wanted = cell(framework, seed=5, strict=True)
    run = launched(kit, forked(kit, source, wanted, only_weights=True), KillPoint.checkpoint(4))
    assert losses(run) == losses(expected)
    assert len(losses(run)) == NUM_STEPS
    assert losses(run) != losses(kit.run_uninterrupted(cell(framework, seed=5)))


def test_two_runs_are_compared(kit: Kit) -> None:
    first = kit.run_uninterrupted(cell("torch"))
    second = launched(kit, kit.new_run(cell("torch")))
    for step in (2, NUM_STEPS):
        assert compare_checkpoints(checkpoint(first, step), checkpoint(second, step)).is_equal
    third = launched(kit, kit.new_run(cell("torch", lr=0.04)))
    found = compare_checkpoints(checkpoint(first, 2), checkpoint(third, 2))
    differing = [each.key for each in found.components if not each.is_equal]
    assert differing == ["model", "optimizer"]
    weights = {each.name for each in found.components[0].tensors}
    assert "layers.0.weight" in weights
    assert {each.name for each in found.settings} >= {"optimizer.param_groups[0].lr"}
