"""A stock Lightning script continues from an export as from its own checkpoint, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from preloads import LIGHTNING

pytest.importorskip("lightning")

from followed_exports import (
    continued,
    differing,
    export,
    require_alike,
    require_seen,
    saved,
    swap_moments,
)
from lightning_export_workloads import NATIVE, SAVED_AT, continue_from, load_module, save_both

from resumekit.testing import Kit

PRELOAD = LIGHTNING
PLAIN = {"two": False, "scaler": False}
CASES: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {**PLAIN, "scaler": True}),
    (1, {**PLAIN, "two": True}),
    (2, PLAIN),
)


@pytest.mark.quick("1-*scaler': True*")
@pytest.mark.parametrize(("num_ranks", "options"), CASES, ids=str)
def test_a_stock_script_continues_as_from_its_own_checkpoint(
    kit: Kit, num_ranks: int, options: dict[str, Any]
) -> None:
    run = saved(kit, save_both, options, num_ranks)
    out, lines = export(run, "lightning", SAVED_AT)
    require_alike(kit, run, continue_from, NATIVE)
    assert sum(line.startswith(("data: ", "rng: ", "hyper_parameters: ")) for line in lines) == 3
    found, native = (torch.load(each, weights_only=True) for each in (out, out.parent / NATIVE))
    assert found.keys() == native.keys()
    assert found["loops"]["fit_loop"] == native["loops"]["fit_loop"]


def test_swapped_moments_are_found_and_the_module_opens_alone(kit: Kit) -> None:
    run = saved(kit, save_both, PLAIN)
    out, _ = export(run, "lightning", SAVED_AT)
    expected = continued(kit, run, load_module, NATIVE)
    assert not differing(continued(kit, run, load_module, out.name), expected)
    swap_moments(out, "optimizer_states", 0)
    require_seen(kit, run, continue_from, NATIVE, out.name)
