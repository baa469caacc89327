"""The conformance kit: does a training function resume exactly, wherever it is killed?

One kit runs many cells::

    with Kit(tmp_path, preload=(*DEFAULT_PRELOAD, "lightning")) as kit:
        cell = Cell(train, {"dropout": 0.1}, kills=(KillPoint.step(7), KillPoint.checkpoint(8)))
        kit.assert_exact(cell)
        kit.assert_caught(cell, "optimizer")     # the negative control: left out, found and named
"""

from resumekit.testing.cells import Cell, KillPoint
from resumekit.testing.kit import DEFAULT_PRELOAD, Kit, LaunchResult, Run
from resumekit.testing.matrix import pairwise

__all__ = ["DEFAULT_PRELOAD", "Cell", "KillPoint", "Kit", "LaunchResult", "Run", "pairwise"]
