"""Lightning Fabric with the Checkpointer of plain PyTorch, as ``train_fabric.py`` shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from preloads import ALL

pytest.importorskip("lightning")

from resumekit.testing import Cell, KillPoint, Kit

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_fabric.py"
PRELOAD = ALL


@pytest.mark.quick("2")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_killed_run_continues_exactly(kit: Kit, world_size: int) -> None:
    kills = (KillPoint.step(8), KillPoint.step(12), KillPoint.step(22))
    cell = Cell(f"{SCRIPT}:train", {"save_every": 5}, world_size, kills)
    kit.assert_exact(cell)
    kit.assert_caught(cell, "data")
