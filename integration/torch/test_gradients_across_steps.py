"""Gradients that outlive their optimizer step are saved; those of other loops are not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from optimizer_workloads import train
from preloads import TORCH

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = TORCH
KILLS = (KillPoint.checkpoint(3), KillPoint.step(7))

NEVER: dict[str, tuple[dict[str, Any], int]] = {
    "plain": ({}, 1),
    "clipped": ({"clip": True}, 1),
    "DDP": ({"layout": "ddp"}, 2),
    "tensor parallel": ({"layout": "tp"}, 2),
    "FSDP2": ({"layout": "fsdp"}, 2),
    "FSDP1": ({"layout": "fsdp1"}, 2),
    "FSDP1, one rank": ({"layout": "fsdp1"}, 1),
}

CLEARED = ("top", "bottom", "before backward", "top zero", "bottom zero")


@pytest.mark.quick("plain", "FSDP2")
@pytest.mark.parametrize("name", NEVER)
def test_a_loop_that_never_clears_gradients_continues_exactly_and_without_them_does_not(
    kit: Kit, name: str
) -> None:
    options, num_ranks = NEVER[name]
    options = {"clears": "never", **options}
    kit.assert_exact(Cell(train, {**options, "checkpoint": {"strict": True}}, num_ranks, KILLS))
    kit.assert_caught(Cell(train, options, num_ranks, KILLS), "model/gradients")


@pytest.mark.full
@pytest.mark.parametrize("save_every", [1, 2])
def test_the_first_checkpoints_hold_what_no_step_has_shown_yet(kit: Kit, save_every: int) -> None:
    for kill in (1, 2, 3):
        options = {"clears": "never", "save_every": save_every}
        kit.assert_exact(Cell(train, options, 1, (KillPoint.checkpoint(kill * save_every),)))


def test_gradients_of_what_is_trained_with_the_model_are_saved_too(kit: Kit) -> None:
    cell = Cell(train, {"clears": "never", "where": "list"}, 1, KILLS)
    kit.assert_exact(cell)
    kit.assert_caught(cell, "optimizer/parameters/gradients")


@pytest.mark.quick("1-bottom zero")
@pytest.mark.parametrize("clears", CLEARED)
@pytest.mark.parametrize("save_every", [1, 3])
def test_a_loop_that_clears_them_continues_exactly(kit: Kit, clears: str, save_every: int) -> None:
    options = {"clears": clears, "clip": True, "save_every": save_every}
    kit.assert_exact(Cell(train, options, 1, KILLS))


LAYOUTS = (("plain", 1), ("ddp", 2), ("tp", 2), ("fsdp", 2), ("fsdp1", 2))
CLEARING = [(*LAYOUTS[0], clears) for clears in CLEARED]
CLEARING += [(*layout, clears) for layout in LAYOUTS[1:] for clears in ("top", "bottom")]


@pytest.mark.quick("ddp-2-bottom")
@pytest.mark.parametrize(("layout", "num_ranks", "clears"), CLEARING)
def test_a_loop_that_clears_them_writes_no_gradient(
    kit: Kit, layout: str, num_ranks: int, clears: str
) -> None:
    run = kit.run_again(kit.new_run(Cell(train, {"layout": layout, "clears": clears}, num_ranks)))
    assert not run.failure
    paths = list(run.directory.glob("training/step-*"))
    assert paths
    for path in paths:
        assert gradient_tensors(path) == []


@pytest.mark.quick("top")
@pytest.mark.parametrize("clears", CLEARED)
def test_a_loop_that_saves_at_every_step_writes_no_gradient_once_it_has_cleared_them(
    kit: Kit, clears: str
) -> None:
    options = {"clears": clears, "save_every": 1, "checkpoint": {"keep_latest": 20}}
    run = kit.run_again(kit.new_run(Cell(train, options, 1)))
    assert not run.failure
    _, second, *later = sorted(run.directory.glob("training/step-*"))
    assert second.name == "step-00000002"
    for path in (second, *later):
        assert gradient_tensors(path) == []


def gradient_tensors(step: Any) -> list[str]:
    """The names of the tensors of gradients in a checkpoint, as safetensors reads them."""
    from safetensors import safe_open

    found: list[str] = []
    for path in step.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found += [name for name in file.keys() if "gradients" in name]  # noqa: SIM118
    return found


def test_what_looks_for_tensors_of_gradients_finds_them(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(train, {"clears": "never"}, 1)))
    (newest, *_) = sorted(run.directory.glob("training/step-*"), reverse=True)
    assert len(gradient_tensors(newest)) == 9  # two parameters get none
    manifest = json.loads((newest / "manifest.json").read_text())
    assert "model/gradients" in [each["key"] for each in manifest["components"]]
