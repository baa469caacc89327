"""Exports that stock scripts continue from, beside the framework's own checkpoint of that step.

A module of training functions has ``save_both``, which saves one step by the framework and into
``run``, and ``continue_from``, a script without resumekit that notes what it loads and trains.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from resumekit.export import export_training
from resumekit.serialization.digests import leaves_of
from resumekit.storage.store import Store
from resumekit.testing import Cell, Kit, Run

EXPORTED, SWAPPED = "exported", "swapped"


def saved(kit: Kit, save_both: Any, options: dict[str, Any], num_ranks: int = 1) -> Run:
    """A run that saved a step in both ways."""
    run = kit.run_again(kit.new_run(Cell(save_both, options, num_ranks)))
    assert not run.failure, run.failure
    return run


def export(run: Run, to: str, step: int, **options: Any) -> tuple[Path, tuple[str, ...]]:
    """An export of a step of a run, and its lines."""
    out, store = run.directory / "training" / EXPORTED, Store(run.directory / "training" / "run")
    (name,) = (each for each in store.step_names() if each.step == step)
    return out, export_training(store.open_step(name), out, to=to, **options)


def continued(kit: Kit, run: Run, continue_from: Any, source: str) -> dict[str, torch.Tensor]:
    """All that a stock script notes on its ranks, by path."""
    cell = Cell(continue_from, {**run.cell.options, "source": source}, run.cell.world_size)
    run = kit.run_again(replace(run, cell=cell))
    assert not run.failure, run.failure
    return noted(run, Path(source).name)


def noted(run: Run, name: str) -> dict[str, torch.Tensor]:
    """All that the ranks of a run noted under a name, by path."""
    files = (f"{name}-{rank}.pt" for rank in range(run.cell.world_size))
    notes = [torch.load(run.directory / "training" / each, weights_only=True) for each in files]
    return {
        str(path): value if isinstance(value, torch.Tensor) else torch.tensor(hash(repr(value)))
        for path, value in leaves_of(notes)
    }


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The paths whose values are not equal to the bit; all have the same."""
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def require_alike(
    kit: Kit, run: Run, continue_from: Any, native: str, source: str = EXPORTED
) -> dict[str, torch.Tensor]:
    """What a stock script notes that continues from an export as from its own checkpoint."""
    expected = continued(kit, run, continue_from, native)
    assert not differing(continued(kit, run, continue_from, source), expected)
    assert any("exp_avg" in name for name in expected)
    assert any("losses" in name for name in expected)
    return expected


def require_seen(
    kit: Kit,
    run: Run,
    continue_from: Any,
    native: str,
    source: str = SWAPPED,
    weights: str = "model",
) -> None:
    """Checks that it trains otherwise from the same weights with other moments."""
    expected = continued(kit, run, continue_from, native)
    found = differing(continued(kit, run, continue_from, source), expected)
    assert any("['losses']" in name for name in found)
    assert not any(f"['loaded']['{weights}']" in name for name in found)


def swap_moments(path: Path, *keys: Any) -> None:
    """Exchanges the two moments of each parameter in a file with an optimizer's state.

    Args:
        path: of the file.
        keys: the way to the state in what the file has.
    """
    content = torch.load(path, weights_only=True)
    optimizer = content
    for key in keys:
        optimizer = optimizer[key]
    for state in optimizer["state"].values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()
    torch.save(content, path)
