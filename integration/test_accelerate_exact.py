"""Accelerate: killed by SIGKILL and started again, a run ends with the same bits.

The cells are chosen so that every two values of two factors meet; ``--full-matrix`` runs the whole
product. Beside them stand the negative controls: with one component left out of the restore, the
comparison must fail and name it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from accelerate_workloads import train

from resumekit.testing import DEFAULT_PRELOAD, Cell, KillPoint, Kit, pairwise

STEPS_PER_EPOCH = 12
SAVE_EVERY = 3

step, checkpoint = KillPoint.step, KillPoint.checkpoint
KILLS = {
    "mid-epoch 0": (step(8),),
    "mid-epoch 1": (step(17),),
    "on the boundary": (checkpoint(12),),
    "on the last step": (step(24),),
    "twice in one epoch": (step(14), step(17)),
    "three times": (step(2), checkpoint(9), step(20)),
}
FEEDS: dict[str, dict[str, Any]] = {
    "shuffled": {},
    "from a generator": {"loader": "generator"},
    "seedable": {"loader": "seedable"},
    "augmented": {"augment": True},
    "augmented by 2 workers": {"augment": True, "workers": "2"},
    "augmented by persistent workers": {"augment": True, "workers": "persistent"},
}
STYLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scheduler registered": {"scheduler": "registered"},
    "bf16": {"precision": "bf16"},
    "gradient scaler": {"scaler": True},
    "in epochs": {"loop": "epochs"},
}
EVERYTHING = {"augment": True, "scaler": True, "report": True}


def cell(options: dict[str, Any], kill: str) -> Cell:
    return Cell(train, {"save_every": SAVE_EVERY, **options}, kills=KILLS[kill])


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    preload = (*DEFAULT_PRELOAD, "sklearn.datasets", "accelerate", "resumekit.adapters.accelerate")
    with Kit(tmp_path_factory.mktemp("cells"), preload=preload) as kit:
        yield kit


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "combination" in metafunc.fixturenames:
        factors = {"kill": list(KILLS), "feed": list(FEEDS), "style": list(STYLES)}
        cells = pairwise(factors, full=metafunc.config.getoption("--full-matrix"))
        metafunc.parametrize("combination", cells, ids=lambda values: ", ".join(values.values()))


def test_a_killed_run_continues_exactly(kit: Kit, combination: dict[str, str]) -> None:
    options = {**FEEDS[combination["feed"]], **STYLES[combination["style"]]}
    kit.assert_exact(cell(options, combination["kill"]))


@pytest.mark.parametrize("accumulate", [2, 5])
@pytest.mark.parametrize("place", ["mid-epoch", "boundary"])
def test_an_accumulated_run_continues_exactly(kit: Kit, accumulate: int, place: str) -> None:
    # 12 batches make 6 windows of 2, or windows of 5, 5 and 2: the end of an epoch ends one.
    epoch = -(-STEPS_PER_EPOCH // accumulate)
    options = {"accumulate": accumulate, "augment": True, "save_every": 1}
    kills = (checkpoint(epoch),) if place == "boundary" else (step(2), step(epoch + 2))
    kit.assert_exact(Cell(train, options, 1, kills))


@pytest.mark.parametrize("kill", ["mid-epoch 1", "on the boundary"])
@pytest.mark.parametrize("feed", ["shuffled", "seedable", "augmented"])
def test_two_ranks_continue_exactly(kit: Kit, feed: str, kill: str) -> None:
    kills = {"mid-epoch 1": (step(8),), "on the boundary": (checkpoint(6),)}[kill]
    kit.assert_exact(Cell(train, {"save_every": SAVE_EVERY, **FEEDS[feed]}, 2, kills))


@pytest.mark.parametrize(
    "component",
    [
        "model",
        "optimizer",
        "lr_scheduler",
        "grad_scaler",
        "ema",
        "data",
        "rng",
        "progress",
        "best_metric",
        "callbacks/accelerator",
        "callbacks/Curriculum-0",
        "extras",
    ],
)
def test_a_component_left_out_is_caught_and_named(kit: Kit, component: str) -> None:
    kit.assert_caught(cell(EVERYTHING, "mid-epoch 1"), component)


def test_a_cold_start_continues_exactly_too(tmp_path: Path) -> None:
    with Kit(tmp_path, cold=True) as cold:
        cold.assert_exact(cell(EVERYTHING, "mid-epoch 1"))
