"""A stock script continues from an export as from what ``save_checkpoint`` wrote, to the bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from preloads import DEEPSPEED

pytest.importorskip("deepspeed")

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_export_workloads import NATIVE, SAME, SAVED_AT, continue_from, save_both
from followed_exports import (
    EXPORTED,
    SWAPPED,
    continued,
    export,
    noted,
    require_alike,
    require_seen,
    saved,
)

from resumekit.testing import Cell, Kit, Run

PRELOAD = DEEPSPEED
OTHERWISE: tuple[tuple[int, dict[str, Any], int, int], ...] = (
    (2, {"stage": 2, "tied": True}, 3, 1),
    (2, {"stage": 3, "tied": True}, 1, 1),
    (2, {"stage": 1}, 1, 1),
    (1, {"stage": 1}, 1, 2),
    (1, {"stage": 3, "precision": "bf16"}, 2, 2),
    (2, {"stage": 2, "precision": "fp16"}, 0, 1),
    (1, {"stage": 0, "precision": "fp16"}, 3, 2),
    (1, {"stage": None, "tied": True, "sub_group_size": 10**9}, 3, 2),
    (1, {"stage": None, "frozen": True}, 2, 2),
)


def loaded(path: Path) -> Any:
    """What a file has, by a reader that knows two more classes."""
    with torch.serialization.safe_globals([LossScaler, DynamicLossScaler]):
        return torch.load(path, weights_only=True)


def wrong_in_fp32(run: Run) -> list[str]:
    """What DeepSpeed's own converter makes of the export that is not as DeepSpeed gathers it."""
    folder, ends = run.directory / "training", (".exp_avg", ".exp_avg_sq")
    weights: Any = get_fp32_state_dict_from_zero_checkpoint(str(folder / EXPORTED))
    gathered = torch.load(folder / "gathered-0.pt", weights_only=True).items()
    expected = {name: each for name, each in gathered if isinstance(each, torch.Tensor)}
    expected = {name: each for name, each in expected.items() if not name.endswith(ends)}
    assert weights.keys() == expected.keys()
    return [n for n, each in expected.items() if not torch.equal(weights[n].float(), each)]


@pytest.mark.quick("2-*'stage': 2*")
@pytest.mark.parametrize(("num_ranks", "options"), SAME, ids=str)
def test_a_stock_script_continues_as_from_its_own_checkpoint(
    kit: Kit, num_ranks: int, options: dict[str, Any]
) -> None:
    run = saved(kit, save_both, options, num_ranks)
    out, lines = export(run, "deepspeed", SAVED_AT)
    expected = require_alike(kit, run, continue_from, NATIVE)
    assert any(line.startswith("client_state:") for line in lines)
    assert options["stage"] or any(line.startswith("zero_to_fp32.py") for line in lines)
    native = {path.name for path in out.with_name(NATIVE).rglob("*.pt")}
    assert {path.name for path in out.rglob("*.pt") if loaded(path)} == native
    assert not options["stage"] or not wrong_in_fp32(run)
    if options.get("frozen"):
        whole = noted(run, "gathered")["state[0]['expand.weight']"]
        assert torch.equal(expected["state[0]['loaded']['expand.weight']"], whole)


@pytest.mark.full
@pytest.mark.parametrize(("num_ranks", "options", "stage", "ranks"), OTHERWISE, ids=str)
def test_another_stage_and_number_of_ranks_load_the_same_state(
    kit: Kit, num_ranks: int, options: dict[str, Any], stage: int, ranks: int
) -> None:
    run = saved(kit, save_both, options, num_ranks)
    out, _ = export(run, "deepspeed", SAVED_AT, ranks=ranks, stage=stage)
    other = replace(run, cell=Cell(save_both, {**options, "stage": stage}, ranks))
    found = continued(kit, other, continue_from, out.name)
    expected = noted(replace(run, cell=Cell(save_both, options)), "gathered")
    assert sum("exp_avg" in name for name in expected) >= 10
    for name, value in expected.items():
        if "loss_scale" not in name:
            assert torch.equal(found[name.replace("[0]", "[0]['loaded']", 1)], value), name
    assert stage == 0 or not wrong_in_fp32(run)


@pytest.mark.full
def test_swapped_moments_are_found(kit: Kit) -> None:
    run = saved(kit, save_both, {"stage": 1})
    out, _ = export(run, "deepspeed", SAVED_AT)
    shutil.copytree(out, out.with_name(SWAPPED))
    (path,) = out.with_name(SWAPPED).rglob("*optim_states.pt")
    content = loaded(path)
    for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()
    torch.save(content, path)
    require_seen(kit, run, continue_from, NATIVE, weights="head.weight")
