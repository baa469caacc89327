"""Accelerate with FSDP2 and with the DeepSpeed plugin: killed, it continues with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")

from accelerate_sharded_workloads import train

from resumekit.testing import DEFAULT_PRELOAD, Cell, KillPoint, Kit

PRELOAD = (
    *DEFAULT_PRELOAD,
    "sklearn.datasets",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # what the first engine would import
    "accelerate",
    "resumekit.adapters.accelerate",
)
KILLS = {
    "mid-epoch 0": (KillPoint.step(4),),
    "on the boundary": (KillPoint.checkpoint(6),),
    "twice in one epoch": (KillPoint.step(8), KillPoint.step(11)),
}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    with Kit(tmp_path_factory.mktemp("kit"), preload=PRELOAD) as kit:
        yield kit


@pytest.mark.parametrize("place", KILLS)
@pytest.mark.parametrize("spread", ["FSDP2", "ZeRO-2"])
def test_a_killed_run_continues_exactly(kit: Kit, spread: str, place: str) -> None:
    kit.assert_exact(Cell(train, {"spread": spread}, 2, KILLS[place]))


@pytest.mark.parametrize(
    "options",
    [
        {"spread": "FSDP2", "accumulate": 2, "augment": True, "save_every": 1},
        {"spread": "FSDP2", "average": True},
        {"spread": "ZeRO-1", "average": True},
        {"spread": "ZeRO-2", "accumulate": 2, "augment": True, "save_every": 1},
        {"spread": "ZeRO-3", "augment": True},
    ],
    ids=str,
)
def test_every_way_to_train_continues_exactly(kit: Kit, options: dict[str, Any]) -> None:
    kit.assert_exact(Cell(train, options, 2, (KillPoint.step(2), KillPoint.step(5))))


@pytest.mark.parametrize("component", ["model", "optimizer", "lr_scheduler", "rng", "data"])
@pytest.mark.parametrize("spread", ["FSDP2", "ZeRO-2"])
def test_a_component_left_out_is_caught_and_named(kit: Kit, spread: str, component: str) -> None:
    kit.assert_caught(Cell(train, {"spread": spread}, 2, (KillPoint.step(5),)), component)
