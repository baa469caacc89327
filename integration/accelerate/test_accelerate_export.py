"""A stock script continues from an export as from what ``save_state`` has written, to the bit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
from preloads import ACCELERATE

pytest.importorskip("accelerate")

from accelerate_export_workloads import (
    NATIVE,
    SAVED_AT,
    SHARDED_AT,
    continue_from,
    load_whole,
    save_both,
    save_sharded,
)
from followed_exports import (
    SWAPPED,
    continued,
    differing,
    export,
    noted,
    require_alike,
    require_seen,
    saved,
    swap_moments,
)

from resumekit.testing import Cell, Kit

PRELOAD = ACCELERATE
PLAIN = {"dtype": "float32", "two": False, "scaler": False, "registered": False}
CASES: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {**PLAIN, "registered": True, "scaler": True}),
    (1, {**PLAIN, "two": True, "dtype": "bfloat16"}),
    (2, PLAIN),
    (2, {**PLAIN, "two": True, "registered": True}),
)


@pytest.mark.quick("1-*registered': True*", "2-*registered': False*")
@pytest.mark.parametrize(("num_ranks", "options"), CASES, ids=str)
def test_a_stock_script_continues_as_from_its_own_checkpoint(
    kit: Kit, num_ranks: int, options: dict[str, Any]
) -> None:
    run = saved(kit, save_both, options, num_ranks)
    out, lines = export(run, "accelerate", SAVED_AT)
    require_alike(kit, run, continue_from, NATIVE)
    native = {path.name for path in out.with_name(NATIVE).iterdir()} - {"resumekit.json"}
    assert {path.name for path in out.iterdir()} == native
    assert any("skip_first_batches(loader, 3)" in line for line in lines)


def test_swapped_moments_are_found(kit: Kit) -> None:
    run = saved(kit, save_both, PLAIN)
    out, _ = export(run, "accelerate", SAVED_AT)
    shutil.copytree(out, out.with_name(SWAPPED))
    swap_moments(out.with_name(SWAPPED) / "optimizer.bin")
    require_seen(kit, run, continue_from, NATIVE)


@pytest.mark.full
def test_a_sharded_step_is_loaded_whole_by_a_script_of_one_rank(kit: Kit) -> None:
    pytest.importorskip("deepspeed")
    run = saved(kit, save_sharded, {}, 2)
    out, _ = export(run, "accelerate", SHARDED_AT)
    whole = replace(run, cell=Cell(save_sharded, {}))
    found = continued(kit, whole, load_whole, out.name)
    assert sum("exp_avg_sq" in name for name in found) == 6
    assert not differing(found, noted(whole, "gathered"))
