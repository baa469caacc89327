"""Under each framework: parameters that are trained and that no module of the run contains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import framework_parameters_workloads as workloads
import pytest
from preloads import ALL

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = ALL

KEY = "optimizer/parameters"
CELLS: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "accelerate": (workloads.with_accelerate, {}),
    "deepspeed": (workloads.with_deepspeed, {}),
    "deepspeed in bf16": (workloads.with_deepspeed, {"precision": "bf16"}),
    "lightning": (workloads.with_lightning, {}),
    "transformers": (workloads.with_transformers, {}),
}


@pytest.mark.quick("accelerate", "deepspeed")
@pytest.mark.parametrize("name", CELLS)
def test_a_killed_run_continues_exactly_and_without_the_values_it_does_not(
    kit: Kit, name: str
) -> None:
    pytest.importorskip(name.split()[0])
    function, options = CELLS[name]
    cell = Cell(function, options, 1, (KillPoint.step(5),))
    kit.assert_exact(cell)
    kit.assert_caught(cell, KEY)
