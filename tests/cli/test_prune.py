"""``resumekit prune``: what it removes, what it never removes, and what it says."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from crashlab.training import Live, resumed
from resumekit.cli import main
from resumekit.errors import NoUsableCheckpointError
from resumekit.storage.store import Store

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert isinstance(ended.value.code, int)
        return (ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 2, 4, 6, 8, 10; that of step 4 is the best."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    live = Live.launch(directory, best_metric="error", keep_latest=None)
    errors = {2: 5.0, 4: 1.0, 6: 2.0, 8: 3.0, 10: 4.0}
    with live.checkpointer as checkpointer:
        for inputs in checkpointer.batches([torch.ones(4, 6)] * 11, epochs=1):
            live.model(inputs).sum().backward()
            live.optimizer.step()
            checkpointer.step()
            if checkpointer.progress.step in errors:
                checkpointer.report(error=errors[checkpointer.progress.step])
            if checkpointer.progress.step == 10:
                checkpointer.save()
            if checkpointer.progress.step == 11:
                break
    return directory


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def names_in(run: Path) -> list[str]:
    return [str(name).removeprefix("step-000000") for name in reversed(Store(run).step_names())]


def _bytes_of(path: Path) -> dict[str, bytes]:
    return {str(each): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}


def _flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _model_file(step: Path) -> Path:
    return next((step / "model").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ("--keep-latest 2", "04 08 10"),
        ("--keep-latest 1 --keep-best 2", "04 06 10"),
        ("--keep-best 1", "04 10"),
        ("--keep-every 4", "04 08 10"),
        ("--keep-latest 99", "02 04 06 08 10"),
    ],
)
def test_the_newest_and_the_best_stay_whatever_else_is_kept(
    run: Path, command: Command, options: str, kept: str
) -> None:
    before = _bytes_of(run)
    dry = command("prune", run, *options.split(), "--dry-run", "--json")
    assert _bytes_of(run) == before
    code, out, err = command("prune", run, *options.split(), "--json")
    assert (code, err) == (0, "")
    assert names_in(run) == kept.split()
    assert (run / "latest").read_text() == "step-00000010\n"
    assert json.loads(dry[1]) == {**json.loads(out), "dry_run": True}
    assert command("verify", run)[0] == 0


def test_the_bytes_it_frees_are_those_that_the_disk_gets_back(run: Path, command: Command) -> None:
    def size() -> int:
        inodes = {each.stat().st_ino: each.stat() for each in run.glob("step-*/*/*")}
        return sum(status.st_size for status in inodes.values())

    shared, *others = (next((run / f"step-000000{n}" / "model").iterdir()) for n in ("02", "06"))
    others[0].unlink()
    others[0].hardlink_to(shared)  # its manifest is not of this file: prune does not read it
    before = size()
    _, out, _ = command("prune", run, "--keep-latest", 2, "--json")
    assert json.loads(out)["freed_bytes"] == before - size()


def test_a_good_checkpoint_before_a_damaged_one_stays(run: Path, command: Command) -> None:
    _flip_byte(_model_file(run / "step-00000010"))
    code, out, _ = command("prune", run, "--keep-latest", 1)
    assert code == 0
    assert "newest good one: step-00000008" in out
    assert names_in(run) == ["04", "08", "10"]


def test_without_a_good_one_nothing_is_removed(run: Path, command: Command) -> None:
    for step in run.glob("step-*"):
        _flip_byte(_model_file(step))
    code, out, err = command("prune", run, "--keep-latest", 1)
    assert (code, out) == (2, "")
    assert "step-00000002/model/" in err
    assert len(names_in(run)) == 5


def test_the_checkpoint_of_another_run_is_neither_counted_nor_removed(
    run: Path, command: Command, tmp_path: Path
) -> None:
    Live.launch(tmp_path / "other").train(until=3)
    shutil.copytree(tmp_path / "other" / "step-00000002", run / "step-00000012")
    shutil.rmtree(run / "step-00000002")
    shutil.copytree(tmp_path / "other" / "step-00000002", run / "step-00000002")
    dry = command("prune", run, "--keep-latest", 1, "--dry-run", "--json")
    code, out, _ = command("prune", run, "--keep-latest", 1, "--json")
    assert code == 0
    assert json.loads(dry[1])["checkpoints"] == json.loads(out)["checkpoints"]
    assert names_in(run) == ["02", "04", "10", "12"]


def test_of_older_ones_the_weights_stay_and_a_resume_passes_over_them(
    run: Path, command: Command, tmp_path: Path
) -> None:
    code, out, _ = command("prune", run, "--weights-only-before", 9)
    assert code == 0
    assert "step-00000008  kept as weights only: step-00000008-r1" in out
    assert names_in(run) == ["02-r1", "04", "06-r1", "08-r1", "10"]
    assert command("list", run)[1].count("weights only") == 3
    assert command("verify", run)[0] == 0
    for name in ("step-00000008-r1", "step-00000010"):
        assert command("export", run / name, tmp_path / f"{name}.safetensors")[0] == 0
    for options, expected in (((), 2), (("--weights-only",), 0)):
        assert command("fork", run / "step-00000008-r1", tmp_path / "new", *options)[0] == expected
    again = command("prune", run, "--weights-only-before", 9, "--json")
    assert json.loads(again[1])["checkpoints"] == []

    _flip_byte(_model_file(run / "step-00000010"))
    report, _ = resumed(run)
    assert report.step == 4
    assert "08-r1: only its weights are left" in str(report.rejected[1])
    shutil.rmtree(run / "step-00000004")
    shutil.rmtree(run / "quarantine")
    with pytest.raises(NoUsableCheckpointError, match="only its weights are left"):
        resumed(run)


def test_what_an_interrupted_call_has_left_is_removed(run: Path, command: Command) -> None:
    shutil.copytree(run / "step-00000008", run.parent / "kept")
    command("prune", run, "--weights-only-before", 9)
    shutil.copytree(run.parent / "kept", run / "step-00000008")
    command("prune", run, "--weights-only-before", 9)
    assert names_in(run) == ["02-r1", "04", "06-r1", "08-r1", "10"]


def test_damaged_weights_stay_as_they_are(run: Path, command: Command) -> None:
    _flip_byte(_model_file(run / "step-00000006"))
    before = _bytes_of(run / "step-00000006")
    code, out, _ = command("prune", run, "--weights-only-before", 9)
    assert code == 1
    assert "step-00000006  step-00000006/model/" in out
    assert _bytes_of(run / "step-00000006") == before
    assert names_in(run) == ["02-r1", "04", "06", "08-r1", "10"]


@pytest.mark.parametrize(("age", "num_reduced"), [("0d", None), ("1h", 0), ("2000d", 0)])
def test_an_age_is_days_hours_or_minutes(
    run: Path, command: Command, age: str, num_reduced: int | None
) -> None:
    code, out, err = command("prune", run, "--weights-only-before", age, "--json")
    assert code == (2 if num_reduced is None else 0)
    assert num_reduced is None or len(json.loads(out)["checkpoints"]) == num_reduced
    assert num_reduced is not None or "a step, or an age such as 30d" in err


def test_an_old_one_is_older_than_an_age(run: Path, command: Command) -> None:
    code, out, _ = command("prune", run, "--weights-only-before", "0.0000001h", "--json")
    assert code == 0
    assert len(json.loads(out)["checkpoints"]) == 3


def test_without_a_limit_it_is_an_error(run: Path, command: Command) -> None:
    code, out, err = command("prune", run)
    assert (code, out) == (2, "")
    assert "--keep-latest" in err


def test_a_live_run_is_refused_by_its_process_but_not_the_dry_run(
    run: Path, command: Command
) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:  # a record lock belongs to a process, so another one has to hold it
        store = Store(run)
        store.acquire()
        os.write(writing, b"1")
        signal.pause()
    try:
        os.read(reading, 1)
        before = names_in(run)
        assert command("prune", run, "--keep-latest", 1, "--dry-run")[0] == 0
        code, out, err = command("prune", run, "--keep-latest", 1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
    assert (code, out) == (2, "")
    assert f"in use by process {child}" in err
    assert names_in(run) == before
