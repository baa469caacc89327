"""Which directories a DeepSpeed run starts in, continues in and refuses; it is never silent."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from preloads import DEEPSPEED

pytest.importorskip("deepspeed")

from deepspeed_workloads import load_natively, save_natively, train

from resumekit.prove import compare
from resumekit.storage.store import Store
from resumekit.testing import Cell, Kit, Run

PRELOAD = DEEPSPEED
PEERS_SECONDS = 10.0
OPTIONS: dict[str, Any] = {"stage": 2, "epochs": 1, "save_every": 2}  # steps 2, 4 and 6
SHARD = "state/rank-00001.safetensors"


@pytest.fixture
def trained(kit: Kit) -> Run:
    """A run on two ranks that is over."""
    run = kit.run_again(kit.new_run(Cell(train, OPTIONS, 2)))
    assert not run.failure, run.failure
    return run


def training(run: Run) -> Path:
    return run.directory / "training"


def launched(kit: Kit, run: Run, **options: Any) -> tuple[Run, list[str]]:
    """The run with one launch more, and the log of each rank."""
    cell = replace(run.cell, options={**OPTIONS, **options})
    run = kit.run_again(replace(run, cell=cell))
    number = len(run.launches) - 1
    logs = (run.directory / f"launch-{number:05d}-rank-{rank:05d}.log" for rank in range(2))
    return run, [log.read_text() for log in logs]


def assert_refused(logs: list[str], error: str, *words: str) -> None:
    """Every rank ended with this error."""
    for each in logs:
        line = next(line for line in each.splitlines() if f"errors.{error}: " in line)
        assert all(word in line for word in words), line


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name not in ("owner.json", ".lock")
    }


@pytest.mark.full
def test_an_empty_directory_is_reported_in_one_line(trained: Run) -> None:
    log = (trained.directory / "launch-00000-rank-00000.log").read_text()
    assert log.count("resumekit: starting in ") == 1
    assert f"starting in {training(trained)}; saves every " in log


def test_a_directory_with_other_files_is_reported_with_their_names(kit: Kit) -> None:
    run = kit.new_run(Cell(train, OPTIONS, 2))
    (training(run) / "notes.txt").write_text("of somebody")
    run, logs = launched(kit, run)
    assert not run.failure
    assert f"starting in {training(run)}, beside notes.txt; saves every " in logs[0]


def test_the_checkpoints_of_deepspeed_are_refused_and_left_alone(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(save_natively, {}, 2)))
    before = content(training(run))
    assert "latest" in before
    run, logs = launched(kit, replace(run, cell=Cell(train, OPTIONS, 2)))
    assert_refused(logs, "DirectoryError", "a checkpoint of DeepSpeed, not a run")
    assert content(training(run)) == before


def test_a_named_step_that_is_missing_is_refused(kit: Kit, trained: Run) -> None:
    _, logs = launched(kit, trained, resume_from="step-00000099")
    assert_refused(logs, "CheckpointNotFoundError", "no such checkpoint in", "step-00000006")
    empty, logs = launched(kit, kit.new_run(trained.cell), resume_from="step-00000006")
    assert_refused(logs, "CheckpointNotFoundError", "no such checkpoint in")
    assert not Store(training(empty)).step_names()


def test_the_run_of_another_model_is_refused_and_left_alone(kit: Kit, trained: Run) -> None:
    before = content(training(trained))
    _, logs = launched(kit, trained, width=16)
    assert_refused(logs, "StateMismatchError", "0.weight", "(32, 64)", "(16, 64)")
    assert content(training(trained)) == before


@pytest.mark.quick("missing")
@pytest.mark.parametrize("damage", ["missing", "flipped"])
def test_a_bad_shard_of_one_rank_sends_all_ranks_to_the_older_checkpoint(
    kit: Kit, trained: Run, damage: str
) -> None:
    newest = Store(training(trained)).step_names()[0]
    spoil(training(trained) / str(newest) / SHARD, damage)
    again, logs = launched(kit, trained)
    assert not again.failure
    verdict = compare(kit.run_uninterrupted(Cell(train, OPTIONS, 2)).trace, again.trace)
    assert verdict.exact, str(verdict)
    assert [resume.step for resume in verdict.resumes] == [4]
    assert f"passed over step-00000006: step-00000006/{SHARD}" in logs[0]


@pytest.mark.full
def test_a_bad_shard_without_an_older_checkpoint_is_an_error_each_time(
    kit: Kit, trained: Run
) -> None:
    newest, *older = Store(training(trained)).step_names()
    for name in older:
        shutil.rmtree(training(trained) / str(name))
    spoil(training(trained) / str(newest) / SHARD, "missing")
    run, logs = launched(kit, trained)
    assert_refused(logs, "NoUsableCheckpointError", SHARD)
    _, logs = launched(kit, run)
    assert_refused(logs, "NoUsableCheckpointError", "all checkpoints are damaged")


def spoil(shard: Path, damage: str) -> None:
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.unlink()
    if damage == "flipped":
        shard.write_bytes(data)


@pytest.mark.quick("a step that is missing")
@pytest.mark.parametrize("wrong", ["empty", "other files", "no latest", "a step that is missing"])
def test_the_stock_engine_finds_nothing_and_says_nothing(kit: Kit, wrong: str) -> None:
    run = kit.run_again(kit.new_run(Cell(save_natively, {}, 2)))
    if wrong in ("empty", "other files"):
        run = kit.new_run(run.cell)
    if wrong == "other files":
        (training(run) / "notes.txt").write_text("of somebody")
    if wrong == "no latest":
        (training(run) / "latest").unlink()
    if wrong == "a step that is missing":
        (training(run) / "latest").write_text("global_step10")
    run = kit.run_again(replace(run, cell=Cell(load_natively, {}, 2)))
    log = run.directory / f"launch-{len(run.launches) - 1:05d}-rank-00000.log"
    if wrong == "a step that is missing":
        assert log.read_text().rstrip().endswith("AssertionError")  # without a word
    else:
        assert not run.failure  # and the user's loop begins at step 0
        assert "loaded (None, None)\n" in log.read_text()
