"""A run goes from plain PyTorch or Accelerate to DeepSpeed and back; nothing is said to any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from preloads import ALL

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")
pytest.importorskip("transformers")

from change_workloads import train

from resumekit.testing import Cell, KillPoint, Kit, Run

PRELOAD = ALL
CHAIN = (None, 2, None)  # for each launch the stage, None for none


def changed(kit: Kit, *, inject: str | None = None, chain: Sequence[Any] = CHAIN) -> Run:
    """A run that is killed twice, and each time continued in the other framework."""
    run = kit.new_run(Cell(train, {"stage": None}), inject=inject)
    kills = (KillPoint.step(3), KillPoint.step(27), None)  # an epoch has 23 steps
    for stage, kill in zip(chain, kills, strict=True):
        run = kit.run_again(replace(run, cell=Cell(train, {"stage": stage})), kill=kill)
        assert not run.failure, run.failure
    assert not run.missed_kills
    return run


def losses(run: Run) -> dict[int, float]:
    """The loss of the last execution of each step."""
    return dict(map(json.loads, (run.directory / "losses.jsonl").read_text().splitlines()))


@pytest.mark.full
def test_its_losses_are_those_of_a_run_that_stays(kit: Kit) -> None:
    whole = kit.run_uninterrupted(Cell(train, {"stage": None}))
    run = changed(kit)
    assert len(losses(whole)) == 46
    assert losses(run) == losses(whole)  # bit for bit
    log = (run.directory / "launch-00002-rank-00000.log").read_text()
    assert "step-00000026 has callbacks/deepspeed, which belongs to DeepSpeed: not needed" in log


def test_it_goes_to_accelerate_and_back_inside_an_epoch_too(kit: Kit) -> None:
    whole = kit.run_uninterrupted(Cell(train, {"stage": None}))
    assert losses(changed(kit, chain=(2, "accelerate", 2))) == losses(whole)


@pytest.mark.full
def test_a_component_left_out_is_seen_in_the_losses(kit: Kit) -> None:
    whole = kit.run_uninterrupted(Cell(train, {"stage": None}))
    found, expected = losses(changed(kit, inject="optimizer")), losses(whole)
    assert found[0] == expected[0]
    assert found != expected
