"""A backbone that is not trained, large enough for files of its own, and what these must be."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from torch import nn

from resumekit.testing import Cell, Kit

_WIDTH = 1100  # so that the parameters take up more than 4 MiB


def frozen_backbone() -> nn.Module:
    """From 64 features to 64 features."""
    layers = (nn.Linear(64, _WIDTH), nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Linear(_WIDTH, 64))
    return nn.Sequential(*layers).requires_grad_(False)


def require_exact_and_linked(kit: Kit, cell: Cell) -> Path:
    """Fails unless the killed run is exact, and shares its frozen files.

    Args:
        kit: that runs it.
        cell: with frozen parameters; every checkpoint is kept.

    Returns:
        The newest checkpoint.
    """
    verdict, run = kit.judge(cell)
    assert (run.failure, run.missed_kills) == ("", ()), cell
    assert verdict.exact, f"{cell}: {verdict}"
    require_links(run.directory / "training")
    return max(run.directory.rglob("step-*/manifest.json")).parent


def require_links(directory: Path) -> None:
    """Fails unless each launch wrote its frozen files twice, and linked to them from then on.

    Args:
        directory: a run directory of which every checkpoint was kept.
    """
    launches = defaultdict(list)
    for path in sorted(directory.rglob("step-*/manifest.json")):
        attempt = json.loads(path.read_text(encoding="utf-8"))["attempt"]
        launches[attempt].append(path.parent)
    num_linked = 0
    for steps in launches.values():
        paths = list(steps[0].rglob("*.frozen.safetensors"))
        assert paths, f"no frozen file in {steps[0]}"
        for file in (path.relative_to(steps[0]) for path in paths):
            found = [(step / file).stat() for step in steps]
            inodes = [each.st_ino for each in found]
            assert len(set(inodes[:2])) == len(inodes[:2]), f"{file}: one copy in two checkpoints"
            assert inodes[2:] == inodes[:-2], f"{file}: {inodes}"
            expected = [len(inodes[i % 2 :: 2]) for i in range(len(inodes))]
            assert [each.st_nlink for each in found] == expected, f"{file}: {found}"
            num_linked += len(inodes[2:])
    assert num_linked, f"no launch made three checkpoints: {dict(launches)}"
