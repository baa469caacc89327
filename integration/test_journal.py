"""What the journal alone finds: a component that is left out on resume, by adapter and class.

The repeated stretch is that of the conformance suite's negative controls. What it cannot find is
listed with the reason; the comparison of the kit, which sees whole states, finds those too.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from resumekit.testing import ConformanceSuite, Kit
from resumekit.testing.journals import worst_verdict

LOST = "reaches neither a loss nor a learning rate within the repeated steps"
REPORTED = "compared with values that come after the repeated steps"
COUNTED = "changes no value of a training step"
CONSTANT = "the scale that the gradients are multiplied with is divided out again"

# By suite: each component with the class that is found, or the reason why none is.
TABLES: dict[str, dict[str, str]] = {
    "test_torch_exact.TestTorch": {
        "model": "loss",
        "optimizer": "learning rate",
        "lr_scheduler": "learning rate",
        "grad_scaler": CONSTANT,
        "ema": LOST,
        "data": "sample ids",
        "rng": "random state",
        "progress": "sample ids",
        "best_metric": REPORTED,
        "extras": COUNTED,
    },
}
CLASSES = ("sample ids", "random state", "learning rate", "loss")


def suite_of(name: str) -> type[ConformanceSuite]:
    module, _, cls = name.partition(".")
    found: type[ConformanceSuite] = getattr(importlib.import_module(module), cls)
    return found


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Kit]]:
    found: dict[str, Kit] = {}
    yield found
    for kit in found.values():
        kit.close()


@pytest.mark.parametrize(
    ("name", "component"),
    [(name, component) for name, table in TABLES.items() for component in table],
)
def test_the_journal_alone_finds_a_component_that_was_left_out(
    kits: dict[str, Kit], tmp_path_factory: pytest.TempPathFactory, name: str, component: str
) -> None:
    suite = suite_of(name)
    if name not in kits:
        kits[name] = suite.new_kit(tmp_path_factory.mktemp("kit"))
    cell = suite.cell("mid-epoch 1", suite.everything)
    run = kits[name].run_killed(cell, inject=component)
    found = worst_verdict(run.directory / "training")
    assert found is not None
    expected = TABLES[name][component]
    if expected in CLASSES:
        assert found.verdict.word == "different", f"{found.verdict} {run.failure}"
        assert f": {expected} " in found.verdict.reason
    else:
        assert found.verdict.word == "identical", f"{found.verdict}"


@pytest.mark.parametrize("name", TABLES)
def test_every_component_of_the_suite_has_a_row(name: str) -> None:
    assert set(TABLES[name]) == set(suite_of(name).components)
