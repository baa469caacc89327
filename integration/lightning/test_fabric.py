"""Lightning Fabric with the Checkpointer of plain PyTorch, as ``train_fabric.py`` shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning")

from resumekit.testing import DEFAULT_PRELOAD, Cell, KillPoint, Kit

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_fabric.py"
PRELOAD = (
    *DEFAULT_PRELOAD,
    "sklearn.datasets",
    "lightning.fabric",
    "resumekit.adapters.torch",
)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_killed_run_continues_exactly(tmp_path: Path, world_size: int) -> None:
    kills = (KillPoint.step(8), KillPoint.step(12), KillPoint.step(22))
    cell = Cell(f"{SCRIPT}:train", {"save_every": 5}, world_size, kills)
    with Kit(tmp_path, preload=PRELOAD) as kit:
        kit.assert_exact(cell)
        kit.assert_caught(cell, "data")
