"""Parameters that an optimizer trains and no module of the run contains: killed and resumed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from optimizer_workloads import train
from preloads import TORCH

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = TORCH
KEY = "optimizer/parameters"
KILLS = (KillPoint.checkpoint(3), KillPoint.step(7))

CELLS: dict[str, tuple[dict[str, Any], int]] = {
    "a bare tensor": ({"where": "bare"}, 1),
    "a group of its own": ({"where": "bare", "groups": True}, 1),
    "a group added later": ({"where": "list", "late": True}, 1),
    "layers in a list": ({"where": "list"}, 1),
    "the head of a loss": ({"where": "head"}, 1),
    "a bare tensor beside DDP": ({"where": "bare", "layout": "ddp"}, 2),
    "the head of a loss beside DDP": ({"where": "head", "layout": "ddp"}, 2),
    "a bare tensor beside FSDP2": ({"where": "bare", "layout": "fsdp"}, 2),
    "sharded layers in a list": ({"where": "list", "layout": "fsdp"}, 2),
    "a bare tensor beside FSDP1": ({"where": "bare", "layout": "fsdp1"}, 2),
    "a bare tensor beside tensor parallel": ({"where": "bare", "layout": "tp"}, 2),
}


@pytest.mark.quick("a group added later", "a bare tensor beside FSDP2")
@pytest.mark.parametrize("name", CELLS)
def test_a_killed_run_continues_exactly_and_without_the_values_it_does_not(
    kit: Kit, name: str
) -> None:
    options, num_ranks = CELLS[name]
    kit.assert_exact(Cell(train, {**options, "checkpoint": {"strict": True}}, num_ranks, KILLS))
    kit.assert_caught(Cell(train, options, num_ranks, KILLS), KEY)


def test_a_run_whose_modules_contain_every_parameter_has_no_such_component(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(train, {}, 1)))
    assert not run.failure
    for path in run.directory.glob("training/step-*/manifest.json"):
        keys = [each["key"] for each in json.loads(path.read_text())["components"]]
        assert "optimizer" in keys
        assert KEY not in keys


@pytest.mark.full
def test_another_layout_and_number_of_ranks_take_the_values_over(kit: Kit) -> None:
    allowed = {"allow_changes": ["world_size", "batch_size"]}
    options = {"where": "bare", "save_every": 1, "checkpoint": allowed}
    chain = (("ddp", 2, 2), ("plain", 1, 4), ("fsdp", 2, 6), ("tp", 2, 8))
    cells = [Cell(train, {**options, "layout": layout}, n) for layout, n, _ in chain]
    run = kit.new_run(cells[0])
    for cell, (_, _, last) in zip(cells, chain, strict=True):
        run = kit.run_again(replace(run, cell=cell), kill=KillPoint.checkpoint(last))
    assert not run.failure
    assert not run.missed_kills
    lines = (run.directory / "values.jsonl").read_text().splitlines()
    steps, values = zip(*map(json.loads, lines), strict=True)
    repeated = [n for n in range(1, len(steps)) if steps[n] == steps[n - 1]]
    assert [steps[n] for n in repeated] == [2, 4, 6]
    assert all(values[n] == values[n - 1] for n in repeated)
    assert len({str(each) for each in values}) == len(values) - len(repeated)
