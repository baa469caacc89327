"""Moments and weights that are tensors made of others: killed and resumed, with their codes."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from preloads import TORCH
from subclass_workloads import train

from resumekit.testing import Cell, KillPoint, Kit
from resumekit.testing.kit import Run

PRELOAD = (*TORCH, "tensor_classes")
KILLS = (KillPoint.step(5), KillPoint.step(16))
needs_torchao = pytest.mark.skipif(not find_spec("torchao"), reason="torchao is not installed")

CELLS: dict[str, tuple[dict[str, Any], int]] = {
    "a class in a class": ({}, 1),
    "a class in a class beside DDP": ({"layout": "ddp"}, 2),
    "a class in a class, saved in the background": ({"checkpoint": {"async_save": True}}, 1),
    "weights of a class": ({"weights": "rows"}, 1),
    "8 bits": ({"optimizer": "AdamW8bit"}, 1),
    "8 bits beside DDP": ({"optimizer": "AdamW8bit", "layout": "ddp"}, 2),
    "4 bits": ({"optimizer": "AdamW4bit"}, 1),
    "float8": ({"optimizer": "AdamWFp8"}, 1),
    "int8 weights": ({"optimizer": "AdamW8bit", "weights": "int8"}, 1),
}


def losses(run: Run, rank: int) -> set[str]:
    """The steps with their losses; one that is repeated has the same one."""
    return set(Path(run.directory, "training", f"losses-{rank}").read_text().splitlines())


def ends(run: Run, rank: int) -> dict[str, torch.Tensor]:
    found = torch.load(run.directory / "training" / f"end-{rank}.pt", weights_only=True)
    assert isinstance(found, dict)
    return found


def differing(whole: Run, killed: Run) -> list[str]:
    """The losses and inner tensors that differ, by the means of torch."""
    assert not whole.failure, whole.failure
    assert not killed.failure, killed.failure
    assert not killed.missed_kills
    names: list[str] = []
    for rank in range(whole.cell.world_size):
        first, second = ends(whole, rank), ends(killed, rank)
        assert first.keys() == second.keys()
        assert any(name.endswith((".codes", ".qdata")) for name in first)
        names += [name for name in first if not _are_equal(first[name], second[name])]
        if losses(whole, rank) != losses(killed, rank):
            names.append("loss")
    return names


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    pairs = [each.contiguous().view(torch.uint8) if each.dim() else each for each in (one, other)]
    return one.dtype == other.dtype and torch.equal(*pairs)


@pytest.mark.quick("a class in a class*", "8 bits beside DDP", "int8 weights")
@pytest.mark.parametrize("name", CELLS)
def test_a_killed_run_has_the_losses_and_the_codes_of_an_uninterrupted_one(
    kit: Kit, name: str
) -> None:
    options, num_ranks = CELLS[name]
    if "optimizer" in options and not find_spec("torchao"):
        pytest.skip("torchao is not installed")
    cell = Cell(train, options, num_ranks, KILLS)
    kit.assert_exact(cell)
    assert differing(kit.run_uninterrupted(cell), kit.run_killed(cell)) == []


@pytest.mark.parametrize(
    "optimizer", ["coded", pytest.param("AdamW8bit", marks=[needs_torchao, pytest.mark.full])]
)
def test_values_that_are_quantized_again_are_seen_to_differ(kit: Kit, optimizer: str) -> None:
    whole = kit.run_uninterrupted(Cell(train, {"optimizer": optimizer}))
    rounded = kit.run_killed(Cell(train, {"optimizer": optimizer, "rounds": True}, 1, KILLS))
    names = differing(whole, rounded)
    assert any("codes" in name for name in names)
    assert "loss" in names


def test_moments_left_out_are_caught(kit: Kit) -> None:
    kit.assert_caught(Cell(train, {}, 1, KILLS), "optimizer")


@needs_torchao
@pytest.mark.full
def test_a_sharded_moment_is_refused_by_its_name_at_the_save_and_at_a_resume(kit: Kit) -> None:
    allowed = {"allow_changes": ["world_size", "batch_size"]}
    options = {"optimizer": "AdamW8bit", "checkpoint": allowed}
    sharded = Cell(train, {**options, "layout": "fsdp"}, 2)
    run = kit.run_again(kit.new_run(sharded))
    assert "UnsupportedValueError" in run.failure
    assert "OptimState8bit" in run.failure
    assert "exp_avg" in run.failure

    run = kit.run_again(kit.new_run(Cell(train, options, 1)), kill=KillPoint.checkpoint(3))
    run = kit.run_again(replace(run, cell=sharded))
    assert "StateMismatchError" in run.failure
    assert "exp_avg" in run.failure
    assert "a moment of a sharded parameter" in run.failure
