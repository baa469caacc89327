"""Plain PyTorch and DDP: killed by SIGKILL and started again, a run ends with the same bits.

The cells are chosen so that every two values of two factors meet; ``--full-matrix`` runs the whole
product. Beside them stand the negative controls: with one component left out of the restore, the
comparison must fail and name it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from workloads import BATCH_SIZE, NUM_SAMPLES, train

from resumekit.testing import Cell, KillPoint, Kit, pairwise

FACTORS: dict[str, tuple[Any, ...]] = {
    "kill": (
        "mid-epoch 0",
        "mid-epoch 1",
        "on the boundary",
        "on the last step",
        "between checkpoints",
        "three times, twice in one epoch",
    ),
    "optimizer": ("sgd", "adamw", "adam with two groups"),
    "feature": ("dropout", "ema", "scheduler", "bf16", "fp16", "all of them"),
    "world_size": (1, 2),
}
FEATURES: dict[str, dict[str, Any]] = {
    "dropout": {"dropout": True},
    "ema": {"dropout": False, "ema": True},
    "scheduler": {"dropout": False, "scheduler": "onecycle"},
    "bf16": {"dropout": False, "amp": "bf16"},
    "fp16": {"dropout": False, "amp": "fp16"},
    "all of them": {"dropout": True, "ema": True, "scheduler": "lambda", "amp": "fp16"},
}
DATA_FACTORS: dict[str, tuple[Any, ...]] = {
    "kill": ("mid-epoch 0", "mid-epoch 1", "on the boundary", "three times, twice in one epoch"),
    "loader": ("shuffle", "generator", "replacement", "weighted", "own", "batch_sampler"),
    "workers": ("0", "2", "persistent"),
    "style": ("plain", "augmented", "accumulated", "in epochs with evaluation"),
}
STYLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "augmented": {"augment": True},
    "accumulated": {"augment": True, "accumulate": 2},
    "in epochs with evaluation": {"augment": True, "loop": "epochs", "report": True},
}
EVERYTHING = {
    "optimizer": "adamw",
    "ema": True,
    "scheduler": "onecycle",
    "amp": "fp16",
    "augment": True,
    "report": True,
}


def steps_per_epoch(options: dict[str, Any], world_size: int) -> int:
    samples = 80 if options.get("loader") == "replacement" else NUM_SAMPLES
    return samples // BATCH_SIZE // world_size // int(options.get("accumulate", 1))


def cell(combination: dict[str, Any]) -> Cell:
    options = dict(combination)
    options.update(FEATURES.get(options.pop("feature", ""), {}))
    options.update(STYLES.get(options.pop("style", ""), {}))
    kill, world_size = options.pop("kill"), options.pop("world_size", 1)
    epoch = steps_per_epoch(options, world_size)
    every = next(number for number in (3, 5, 1) if epoch % number == 0 and epoch > number)
    options["save_every"] = every
    step, checkpoint = KillPoint.step, KillPoint.checkpoint
    kills = {
        "mid-epoch 0": (step(epoch // 2 + 2),),
        "mid-epoch 1": (step(epoch + epoch // 2),),
        "on the boundary": (checkpoint(epoch),),
        "on the last step": (step(2 * epoch),),
        "between checkpoints": (step(every + 1),),
        "three times, twice in one epoch": (
            step(every + 1),
            step(every + 2),
            checkpoint(epoch + every if epoch > every else 2 * epoch),
        ),
    }[kill]
    return Cell(train, options, world_size, kills)


def name(combination: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in combination.items())


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    # torch._dynamo: the first optimizer of a process imports it, which takes seconds.
    preload = ("torch._dynamo", "sklearn.datasets", "resumekit.adapters.torch")
    with Kit(tmp_path_factory.mktemp("cells"), preload=preload) as kit:
        yield kit


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = metafunc.config.getoption("--full-matrix")
    if "trained" in metafunc.fixturenames:
        cells = pairwise(FACTORS, full=full)
        metafunc.parametrize("trained", cells, ids=name)
    if "fed" in metafunc.fixturenames:
        cells = pairwise(DATA_FACTORS, full=full)
        metafunc.parametrize("fed", cells, ids=name)


def test_every_way_to_train_continues_exactly(kit: Kit, trained: dict[str, Any]) -> None:
    kit.assert_exact(cell(trained))


def test_every_way_to_feed_continues_exactly(kit: Kit, fed: dict[str, Any]) -> None:
    kit.assert_exact(cell(fed))


@pytest.mark.parametrize("world_size", [1, 2])
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
        "extras",
    ],
)
def test_a_component_left_out_is_caught_and_named(
    kit: Kit, component: str, world_size: int
) -> None:
    left_out = {**EVERYTHING, "kill": "mid-epoch 1", "world_size": world_size}
    kit.assert_caught(cell(left_out), component)


def test_a_cold_start_continues_exactly_too(tmp_path: Path) -> None:
    with Kit(tmp_path, cold=True) as cold:
        cold.assert_exact(cell({**EVERYTHING, "kill": "three times, twice in one epoch"}))
