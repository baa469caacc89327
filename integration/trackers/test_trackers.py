"""Trackers after kills: each has one run, with the rows of an uninterrupted run, each once.

What a tracker has is read from its files by its own reader. Times are not compared.
"""

from __future__ import annotations

import csv
import json
import shutil
import sqlite3
import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from preloads import ALL
from tracker_workloads import (
    accelerate,
    database,
    lightning,
    plain,
    plain_mlflow,
    plain_trackio,
    trainer,
)

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


def in_mlflow(directory: Path) -> dict[str, Rows]:
    """The metrics and parameters of each run that is not deleted, by its number."""
    found: dict[str, Rows] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that MLflow uses
        from mlflow import MlflowClient

        client = MlflowClient(database(directory))
        experiments = [each.experiment_id for each in client.search_experiments()]
        for number, run in enumerate(client.search_runs(experiments)):
            data = run.data
            rows: Rows = [
                (key, each.step, each.value)
                for key in sorted(data.metrics)
                for each in client.get_metric_history(run.info.run_id, key)
            ]
            rows += [("parameter", key, "") for key in sorted(data.params)]
            found[f"run {number}"] = [*rows, ("status", run.info.status)]
    return found


def in_trackio(directory: Path) -> dict[str, Rows]:
    """The rows of each run in the SQLite files, and the settings that it has."""
    found: dict[str, Rows] = {}
    for path in sorted(directory.glob("*.db")):
        with closing(sqlite3.connect(path)) as file:
            known = file.execute("SELECT run_id FROM metrics UNION SELECT run_id FROM configs")
            for number, (run_id,) in enumerate(known.fetchall()):
                rows: Rows = []
                query = "SELECT step, metrics FROM metrics WHERE run_id = ? ORDER BY id"
                for step, text in file.execute(query, (run_id,)):
                    rows += [(key, step, value) for key, value in json.loads(text).items()]
                query = "SELECT config FROM configs WHERE run_id = ?"
                for (text,) in file.execute(query, (run_id,)):
                    rows += [("setting", key, "") for key in json.loads(text)]
                found[f"run {number} of {path.name}"] = rows
    return found


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
    "MLflow, a plain loop": (plain_mlflow, {}, in_mlflow),
    "MLflow, Accelerate": (accelerate, {"log_with": "mlflow"}, in_mlflow),
    "MLflow, the Trainer": (trainer, {"report_to": "mlflow"}, in_mlflow),
    "MLflow, Lightning": (lightning, {"loggers": ["mlflow"]}, in_mlflow),
    "trackio, a plain loop": (plain_trackio, {}, in_trackio),
    "trackio, a plain loop with steps": (plain_trackio, {"steps": True}, in_trackio),
    "trackio, Accelerate": (accelerate, {"log_with": "trackio"}, in_trackio),
    "trackio, the Trainer": (trainer, {"report_to": "trackio"}, in_trackio),
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
    for name in ("tensorboard", "mlflow", "trackio"):
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


FINISHED = [name for name in PLACES if "one" not in name]


@pytest.mark.full
@pytest.mark.parametrize("name", FINISHED)
def test_a_launch_after_the_end_adds_nothing(kit: Kit, name: str) -> None:
    function, options, read = PLACES[name]
    require((name.lower(), options))
    run = kit.run_again(kit.new_run(Cell(function, options)))
    expected = read(run.directory / "training")
    run = kit.run_again(run)
    assert not run.failure, run.failure
    assert read(run.directory / "training") == expected


def test_trackio_has_the_names_that_are_used() -> None:
    trackio = pytest.importorskip("trackio.run")
    used = {"_client_lock", "_flush_queues_inline"}
    assert used <= set(trackio.Run._local_batch_sender.__code__.co_names)
    assert {"_next_step", "id", "name", "project"} <= set(trackio.Run.log.__code__.co_names)


@pytest.mark.full
def test_files_of_other_runs_stay(kit: Kit) -> None:
    require(["tensorboard"])
    run = kit.new_run(Cell(plain, {"fixed": True}))
    folder = run.directory / "training" / "logs"
    folder.mkdir()
    others = [folder / f"events.out.tfevents.{n}.host.1.0" for n in (1, 3_000_000_000)]
    others.append(folder / "events.out.tfevents.2.host.1.0.resumekit-01234567")
    for each in others:
        each.write_bytes(b"rows of another run")
    for kill in (*KILLS, None):
        run = kit.run_again(run, kill=kill)
    assert not run.failure, run.failure
    assert {each.read_bytes() for each in others} == {b"rows of another run"}


@pytest.mark.full
def test_a_tracker_that_cannot_continue_is_one_warning(kit: Kit) -> None:
    require(["tensorboard"])
    run = kit.run_again(kit.new_run(Cell(plain)), kill=KILLS[0])
    (folder,) = (run.directory / "training").glob("logs-*")
    shutil.rmtree(folder)
    run = kit.run_again(run)
    assert not run.failure, run.failure
    (log,) = run.directory.glob("launch-00001-*.log")
    lines = [line for line in log.read_text().splitlines() if "TensorBoard" in line]
    assert len(lines) == 1
    assert "TensorBoard cannot continue its run: FileNotFoundError" in lines[0]


@pytest.mark.quick("CSV, Lightning")
@pytest.mark.parametrize("name", PLACES)
def test_control_without_marks_the_rows_are_others(kit: Kit, name: str) -> None:
    function, options, read = PLACES[name]
    require((name.lower(), options))
    cell = Cell(function, {**options, "trackers": "off"}, kills=KILLS)
    expected = without_clocks(read(uninterrupted(kit, cell)))
    assert without_clocks(read(killed(kit, cell))) != expected
