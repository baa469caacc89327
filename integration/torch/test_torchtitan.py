"""torchtitan's checkpoint manager saves into a run directory; a killed job continues from there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from preloads import TORCH

pytest.importorskip("torchtitan.components.checkpoint", reason="pip install torchtitan")

from torchtitan_training import INTERVAL, NUM_STEPS, train

from resumekit.cli import main
from resumekit.testing import Cell, Kit, Run

PRELOAD = TORCH
KILLED_AT = 3 * INTERVAL
LOADED = 2 * INTERVAL


def notes_of(run: Run) -> list[dict[str, Any]]:
    folder = run.directory / "training"
    return [torch.load(folder / f"notes-{rank}.pt", weights_only=True) for rank in range(2)]


def is_same(found: list[dict[str, Any]], whole: list[dict[str, Any]], names: str) -> bool:
    """Whether both ranks have the last steps of the uninterrupted run, bit for bit."""
    for mine, other in zip(found, whole, strict=True):
        for name in names.split():
            then = other[name] if name == "weights" else other[name][LOADED:]
            pairs = zip(map(torch.as_tensor, mine[name]), map(torch.as_tensor, then), strict=True)
            if not all(torch.equal(*pair) for pair in pairs):
                return False
    return True


def steps_in(run: Run) -> list[str]:
    return sorted(each.name for each in (run.directory / "training" / "run").glob("step-*"))


def continued(kit: Kit, run: Run, **options: Any) -> Run:
    """The same after another launch, which comes to its end."""
    again = kit.run_again(replace(run, cell=Cell(train, options, 2)))
    assert not again.launches[-1].failure
    return again


@pytest.mark.quick("disabled")
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_job_that_is_killed_in_a_save_continues_bit_for_bit(kit: Kit, mode: str) -> None:
    whole = kit.run_uninterrupted(Cell(train, {"mode": mode}, 2))
    assert steps_in(whole) == [f"step-{step:08d}" for step in (6, NUM_STEPS)]
    killed = kit.run_again(kit.new_run(Cell(train, {"mode": mode, "killed_at": KILLED_AT}, 2)))
    assert killed.failure
    assert steps_in(killed) == [f"step-{step:08d}" for step in (2, LOADED)]
    found = notes_of(continued(kit, killed, mode=mode))
    assert [each["first"] for each in found] == [LOADED, LOADED]
    assert is_same(found, notes_of(whole), "losses samples rates weights")
    assert [each["counts"] for each in found] == [each["counts"] for each in notes_of(whole)]
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(killed.directory / "training" / "run")])
    assert ended.value.code == 0


@pytest.mark.full
def test_without_the_optimizer_it_continues_otherwise(kit: Kit) -> None:
    whole = kit.run_uninterrupted(Cell(train, {"mode": "disabled"}, 2))
    killed = kit.run_again(kit.new_run(Cell(train, {"killed_at": KILLED_AT}, 2)))
    found = notes_of(continued(kit, killed, exclude="optimizer"))
    assert is_same(found, notes_of(whole), "samples rates")
    assert not is_same(found, notes_of(whole), "losses")
