"""A stock Trainer continues from an export as from its own checkpoint, to the bit."""

from __future__ import annotations

import importlib.util
import shutil
from typing import Any

import pytest
from preloads import TRAINER

pytest.importorskip("transformers")

from followed_exports import (
    SWAPPED,
    export,
    require_alike,
    require_seen,
    saved,
    swap_moments,
)
from trainer_export_workloads import NATIVE, SAVED_AT, continue_from, save_both

from resumekit.testing import Kit

PRELOAD = TRAINER
PLAIN = {"dtype": "float32", "lora": False, "accumulate": 1}
CASES: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {**PLAIN, "accumulate": 2}),
    (1, {**PLAIN, "dtype": "bfloat16"}),
    (1, {**PLAIN, "lora": True}),
    (2, PLAIN),
)


@pytest.mark.quick("1-*lora': True*", "2-*")
@pytest.mark.parametrize(("num_ranks", "options"), CASES, ids=str)
def test_a_stock_trainer_continues_as_from_its_own_checkpoint(
    kit: Kit, num_ranks: int, options: dict[str, Any]
) -> None:
    if options["lora"] and not importlib.util.find_spec("peft"):
        pytest.skip("pip install peft")
    run = saved(kit, save_both, options, num_ranks)
    out, lines = export(run, "trainer", SAVED_AT)
    require_alike(kit, run, continue_from, NATIVE)
    native = {path.name for path in (out.parent / NATIVE).iterdir()}
    assert native - {path.name for path in out.iterdir()} <= {"training_args.bin", "README.md"}
    assert not [line for line in lines if "500" in line]


def test_swapped_moments_are_found(kit: Kit) -> None:
    run = saved(kit, save_both, PLAIN)
    out, _ = export(run, "trainer", SAVED_AT)
    shutil.copytree(out, out.with_name(SWAPPED))
    swap_moments(out.with_name(SWAPPED) / "optimizer.pt")
    require_seen(kit, run, continue_from, NATIVE)
