"""The conformance kit: does a training function resume exactly, wherever it is killed?

A test file inherits the whole suite and names its training function; see ``ConformanceSuite``::

    class TestMine(ConformanceSuite):
        function = train
        steps_per_epoch = 12
        save_every = 3
        components = ("model", "optimizer", "data", "rng", "progress")

The suite stands on a kit, which runs many cells::

    with Kit(tmp_path, preload=(*DEFAULT_PRELOAD, "lightning")) as kit:
        cell = Cell(train, {"dropout": 0.1}, kills=(KillPoint.step(7), KillPoint.checkpoint(8)))
        kit.assert_exact(cell)
        kit.assert_caught(cell, "optimizer")     # the negative control: left out, found and named
        kit.assert_finished(cell)                # launched once more, it does nothing

Only the suite needs pytest, so it is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resumekit.record.trace import KillPoint
from resumekit.testing.cells import KILL_POINTS, Cell, kill_points, pairwise
from resumekit.testing.kit import DEFAULT_PRELOAD, Kit, LaunchResult, Run

if TYPE_CHECKING:
    from resumekit.testing.suite import ConformanceSuite

__all__ = [
    "DEFAULT_PRELOAD",
    "KILL_POINTS",
    "Cell",
    "ConformanceSuite",
    "KillPoint",
    "Kit",
    "LaunchResult",
    "Run",
    "kill_points",
    "pairwise",
]


def __getattr__(name: str) -> Any:
    if name == "ConformanceSuite":
        from resumekit.testing.suite import ConformanceSuite

        return ConformanceSuite
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
