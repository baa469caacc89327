"""Trackers after kills: each has one run, with the rows of an uninterrupted run, each once.

What a tracker has is read from its files by its own reader. Times are not compared.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from preloads import ALL
from tracker_workloads import accelerate, lightning, plain, trainer

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = ALL

# In the first epoch twice after the same save, at a commit, and in the second epoch.
KILLS = (KillPoint.step(5), KillPoint.step(5), KillPoint.checkpoint(12), KillPoint.step(17))
CLOCKS = ("runtime", "per_second", "_timestamp", "_runtime")

Rows = list[tuple[Any, ...]]


def in_event_files(directory: Path) -> dict[str, Rows]:
    """By the directory of each run, without the time in its name."""
    pytest.importorskip("tensorboard", reason="reads the event files")
    from tensorboard.backend.event_processing.event_accumulator import (
        COMPRESSED_HISTOGRAMS,
        SCALARS,
        TENSORS,
        EventAccumulator,
    )

    found: dict[str, Rows] = {}
    everything = {SCALARS: 0, TENSORS: 0, COMPRESSED_HISTOGRAMS: 0}
    for folder in sorted({path.parent for path in directory.rglob("events.out.tfevents.*")}):
        # What it would hide by `purge_step` counts.
        read = EventAccumulator(str(folder), everything, purge_orphaned_data=False).Reload()
        tags = read.Tags()
        rows: Rows = [(t, e.step, e.value) for t in tags["scalars"] for e in read.Scalars(t)]
        for tag in tags["tensors"]:
            for event in read.Tensors(tag):
                text = b"".join(event.tensor_proto.string_val).decode(errors="replace")
                rows.append((tag, event.step, text if tag != "args/text_summary" else ""))
        name = folder.relative_to(directory).as_posix()
        is_timed = any(character.isdigit() for character in name) and "version" not in name
        key = f"a run {len(found)}" if is_timed else name
        found[key] = rows
    return found


def in_csv_files(directory: Path) -> dict[str, Rows]:
    """By the path of each file; a row with its line."""
    return {
        path.relative_to(directory).as_posix(): [
            (number, *sorted(row.items()))
            for number, row in enumerate(csv.DictReader(path.read_text().splitlines()))
        ]
        for path in sorted(directory.rglob("metrics.csv"))
    }


def without_clocks(found: dict[str, Rows]) -> dict[str, Rows]:
    return {
        run: [row for row in rows if not any(clock in str(row[0]) for clock in CLOCKS)]
        for run, rows in found.items()
    }


Reader = Callable[[Path], dict[str, Rows]]
PLACES: dict[str, tuple[Callable[..., None], dict[str, Any], Reader]] = {
    "TensorBoard, a plain loop": (plain, {}, in_event_files),
    "TensorBoard, a plain loop with one directory": (plain, {"fixed": True}, in_event_files),
    "TensorBoard, Accelerate": (accelerate, {"log_with": "tensorboard"}, in_event_files),
    "TensorBoard, the Trainer": (trainer, {"report_to": "tensorboard"}, in_event_files),
    "TensorBoard, Lightning": (lightning, {"loggers": ["tensorboard"]}, in_event_files),
    "TensorBoard, Lightning with one version": (
        lightning,
        {"loggers": ["tensorboard"], "version": "one"},
        in_event_files,
    ),
    "CSV, Lightning": (lightning, {"loggers": ["csv"]}, in_csv_files),
    "CSV, Lightning with one version": (
        lightning,
        {"loggers": ["csv"], "version": "one"},
        in_csv_files,
    ),
}


def killed(kit: Kit, cell: Cell) -> Path:
    """The directory of a run that was killed, and launched until it ended."""
    run = kit.run_killed(cell)
    assert not run.failure, run.failure
    assert not run.missed_kills
    return run.directory / "training"


def uninterrupted(kit: Kit, cell: Cell) -> Path:
    return kit.run_uninterrupted(cell).directory / "training"


def require(options: Iterable[Any]) -> None:
    for name in ("tensorboard", "mlflow", "wandb", "trackio"):
        if name in str(options):
            pytest.importorskip(name)


@pytest.mark.quick("TensorBoard, a plain loop", "CSV, Lightning")
@pytest.mark.parametrize("name", PLACES)
def test_after_kills_a_tracker_has_the_rows_of_an_uninterrupted_run(kit: Kit, name: str) -> None:
    function, options, read = PLACES[name]
    require((name.lower(), options))
    cell = Cell(function, options, kills=KILLS)
    expected = without_clocks(read(uninterrupted(kit, cell)))
    assert sum(map(len, expected.values())) > 20
    assert without_clocks(read(killed(kit, cell))) == expected


@pytest.mark.quick("CSV, Lightning")
@pytest.mark.parametrize("name", PLACES)
def test_control_without_marks_the_rows_are_others(kit: Kit, name: str) -> None:
    function, options, read = PLACES[name]
    require((name.lower(), options))
    cell = Cell(function, {**options, "trackers": "off"}, kills=KILLS)
    expected = without_clocks(read(uninterrupted(kit, cell)))
    assert without_clocks(read(killed(kit, cell))) != expected
