"""``dcp.load`` of checkpoints that the adapter wrote, in every layout and on several ranks.

What is expected is what the training that wrote the checkpoint gathered itself, by torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pipeline_workloads
import pytest
from dcp_workloads import choose, load, load_stages
from preloads import TORCH
from sharded_workloads import take_over

from resumekit.testing import Cell, Kit, Run

PRELOAD = (*TORCH, "resumekit.dcp")

Layout = tuple[str, int]


def written(kit: Kit, layout: Layout, **options: Any) -> Run:
    """A run with one step."""
    cell = Cell(take_over, {"layout": layout[0], "num_beyond": 0, **options}, layout[1])
    return launched(kit, kit.new_run(cell), cell)


def launched(kit: Kit, run: Run, cell: Cell) -> Run:
    run = kit.run_again(replace(run, cell=cell))
    assert not run.failure, f"{cell}: {run.failure}"
    return run


def loads(run: Run) -> list[list[dict[str, Any]]]:
    """What the ranks of each launch that loads have noted."""
    lines = (run.directory / "loads.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def saved(run: Run) -> dict[str, list[int]]:
    """Every tensor that training had at the save, by name; its bits as numbers."""
    found = json.loads((run.directory / "notes.jsonl").read_text().splitlines()[0])["state_saved"]
    return trained(found)


def trained(state: dict[str, list[int]]) -> dict[str, list[int]]:
    """Without moments of the layer that never had a gradient, which ``get_state_dict`` makes."""
    layer = ("unused.weight.", "unused.bias.")
    return {name: bits for name, bits in state.items() if not name.startswith(layer)}


def assert_loads(kit: Kit, run: Run, layouts: Sequence[Layout], **options: Any) -> None:
    expected = saved(run)
    assert {"expand.weight", "expand.weight.exp_avg", "expand.weight.step"} <= expected.keys()
    for layout, num_ranks in layouts:
        run = launched(kit, run, Cell(load, {"layout": layout, **options}, num_ranks))
        for notes in loads(run)[-1]:
            assert notes["failures"] == {}
            assert trained(notes["state"]) == expected, layout
            assert notes["rates"], layout
            assert "model..expand.weight." not in notes["changed"]


TAKEN_OVER: dict[str, tuple[Layout, tuple[Layout, ...]]] = {
    "fsdp": (("fsdp", 2), (("fsdp", 3), ("plain", 1))),
    "ddp": (("ddp", 2), (("fsdp", 2), ("ddp", 3))),
    "plain": (("plain", 1), (("hsdp", 4), ("tp", 2), ("fsdp1", 2))),
    "hsdp": (("hsdp", 4), (("tp", 2), ("hsdp", 4), ("plain", 1))),
    "tp": (("tp", 2), (("fsdp x tp", 4), ("fsdp", 3))),
    "fsdp x tp": (("fsdp x tp", 4), (("plain", 1), ("fsdp", 2))),
    "fsdp1": (("fsdp1", 2), (("fsdp", 3), ("plain", 1), ("fsdp1", 2))),
    "fsdp1 on 3": (("fsdp1", 3), (("fsdp", 2), ("ddp", 2))),
    "hsdp1": (("hsdp1", 4), (("fsdp", 3), ("fsdp1", 2), ("hsdp1", 4), ("fsdp1", 3))),
}


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("writer", TAKEN_OVER)
def test_any_layout_takes_the_bits_of_any_other(kit: Kit, writer: str) -> None:
    layout, others = TAKEN_OVER[writer]
    assert_loads(kit, written(kit, layout), others)


@pytest.mark.full
def test_groups_of_parameters_keep_their_settings(kit: Kit) -> None:
    run = written(kit, ("fsdp", 2), optimizer="groups")
    assert_loads(kit, run, (("fsdp", 3), ("plain", 1)), optimizer="groups")


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "num_ranks", "loaded"),
    [
        ({"style": "fsdp"}, 4, ((1, "alone", 1), (2, "alone", 2), (2, "fsdp", 4))),
        ({"own_rates": True}, 2, ((2, "alone", 2),)),
    ],
    ids=("fsdp", "own rates"),
)
def test_stages_of_a_pipeline_are_loaded_into_others(
    kit: Kit, options: dict[str, Any], num_ranks: int, loaded: Sequence[tuple[int, str, int]]
) -> None:
    options = {"num_stages": 2, "num_beyond": 0, **options}
    cell = Cell(pipeline_workloads.take_over, options, num_ranks)
    run = launched(kit, kit.new_run(cell), cell)
    expected = json.loads((run.directory / "notes.jsonl").read_text())["state_saved"]
    rates = {value for name, value in expected.items() if name.endswith(".lr")}
    assert len(rates) == (3 if "own_rates" in options else 2)
    for num_stages, style, ranks in loaded:
        cell = Cell(load_stages, {"num_stages": num_stages, "style": style}, ranks)
        run = launched(kit, run, cell)
        assert [notes["state"] for notes in loads(run)[-1]] == [expected] * ranks, cell


def test_damage_that_one_rank_sees_changes_no_tensor_on_any(kit: Kit) -> None:
    run = written(kit, ("fsdp", 2))
    (path,) = Path(run.directory).glob("training/step-*/optimizer/rank-00001.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    for is_late in (False, True):
        run = launched(kit, run, Cell(load, {"layout": "fsdp", "is_late": is_late}, 2))
    early, late = loads(run)
    for notes in early:
        assert notes["changed"] == []
        assert [*notes["failures"]] == ["1"]
        assert "CorruptCheckpointError" in notes["failures"]["1"]
        assert "optimizer/rank-00001.safetensors" in notes["failures"]["1"]
    assert late[0]["changed"] != []  # the control: verified when it is copied
    assert late[1]["changed"] == []


def test_the_first_rank_chooses_the_checkpoint_for_all(kit: Kit) -> None:
    run = written(kit, ("plain", 1))
    directory, newer = run.directory / "training", run.directory / "newer"
    shutil.copytree(directory, newer)
    (step,) = directory.glob("step-*")
    second = f"{step.name}-r1"
    run = launched(kit, run, run.cell)  # replaces it
    shutil.move(directory / second, newer / second)
    shutil.copytree(newer / step.name, step)
    for others in (newer, directory):
        run = launched(kit, run, Cell(choose, {"others": str(others)}, 2))
    group = {"others": str(newer), "ranks": [1, 2]}
    run = launched(kit, run, Cell(choose, group, 3))
    shutil.rmtree(step)
    run = launched(kit, run, Cell(choose, {"others": str(newer)}, 2))
    shutil.copytree(newer / second, directory / second)
    run = launched(kit, run, Cell(choose, {"others": str(newer)}, 2))
    first, last, error = {"step": step.name}, {"step": second}, {"error": "CheckpointNotFoundError"}
    assert loads(run)[:2] == [[first, first]] * 2
    assert loads(run)[2:] == [[{}, first, first], [error, error], [last, last]]
