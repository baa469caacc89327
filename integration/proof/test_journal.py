"""What the journal alone finds: a component that is left out on resume, by adapter and class.

The repeated steps are those of the conformance suite's negative controls: two steps. What the
journal cannot find is listed with the reason; the kit, which compares whole states, finds it.
"""

from __future__ import annotations

import importlib

import pytest
from journals import worst_verdict
from preloads import ALL

from resumekit.testing import ConformanceSuite, Kit

PRELOAD = ALL

AVERAGED = "an average of the weights reaches no loss"
LOGGED = "sums that the log reads, and no training step"
REPORTED = "a metric of evaluations reaches no training step"
COUNTED = "counters that no training step reads"
DIVIDED_OUT = "gradients are divided by the scale that they were multiplied with"

PLATEAU = "a plateau scheduler waits for a metric; the rate itself is the optimizer's"
NONE = "not used by this suite"

COMMON = {
    "model": "loss",
    "optimizer": "weights",
    "lr_scheduler": "learning rate",
    "grad_scaler": DIVIDED_OUT,
    "ema": AVERAGED,
    "data": "sample ids",
    "rng": "random state",
    "progress": "step count",
    "best_metric": REPORTED,
    "extras": COUNTED,
}
CALLBACKS: dict[str, dict[str, str]] = {
    "test_torch_exact.TestTorch": {},
    "test_accelerate_exact.TestAccelerate": {
        "callbacks/accelerator": COUNTED,
        "callbacks/Curriculum-0": COUNTED,
    },
    "test_transformers_exact.TestTransformers": {
        "grad_scaler": "weights",
        "callbacks/trainer_state": COUNTED,
        "callbacks/trainer": LOGGED,
        "callbacks/EarlyStoppingCallback-0": REPORTED,
    },
    "test_lightning_exact.TestLightning": {
        "lr_scheduler": PLATEAU,
        "callbacks/lightning": COUNTED,
        "callbacks/hooks": COUNTED,
        "callbacks/attributes": COUNTED,
        "callbacks/Counting-0": COUNTED,
        "callbacks/EarlyStopping-0": REPORTED,
    },
    "test_deepspeed_exact.TestDeepSpeed": {
        "grad_scaler": NONE,
        "callbacks/deepspeed": COUNTED,
    },
}
CLASSES = ("step count", "sample ids", "random state", "learning rate", "loss", "weights")
TABLES = {
    name: {key: row for key, row in {**COMMON, **rows}.items() if row != NONE}
    for name, rows in CALLBACKS.items()
}
ROWS = [(name, component) for name, table in TABLES.items() for component in table]


def suite_of(name: str) -> type[ConformanceSuite]:
    module, _, cls = name.partition(".")
    found: type[ConformanceSuite] = getattr(importlib.import_module(module), cls)
    return found


@pytest.mark.quick(
    "test_torch_exact.TestTorch-model",
    "test_torch_exact.TestTorch-optimizer",
    "test_torch_exact.TestTorch-lr*",
    "test_torch_exact.TestTorch-grad*",
    "test_torch_exact.TestTorch-ema",
    "test_torch_exact.TestTorch-rng",
    "test_torch_exact.TestTorch-progress",
    "*-data",
)
@pytest.mark.parametrize(("name", "component"), ROWS)
def test_the_journal_alone_finds_a_component_that_was_left_out(
    kit: Kit, name: str, component: str
) -> None:
    suite = suite_of(name)
    cell = suite.cell("mid-epoch 1", suite.everything)
    run = kit.run_killed(cell, inject=component)
    found = worst_verdict(run.directory / "training")
    assert found is not None, run.failure
    expected = TABLES[name][component]
    if expected in CLASSES:
        assert found.verdict.word == "different", f"{found.verdict} {run.failure}"
        assert f": {expected} " in found.verdict.reason
    else:
        assert str(found.verdict) == "2 repeated steps: identical"


@pytest.mark.parametrize("name", TABLES)
def test_every_component_of_the_suite_has_a_row(name: str) -> None:
    assert set(TABLES[name]) == set(suite_of(name).components)
