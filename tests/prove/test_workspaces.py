"""Copies of the working directory, and the checkpoints that scripts write by their own means."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from resumekit.errors import ConfigurationError
from resumekit.prove import Outcome, prove, workspaces
from resumekit.prove.workspaces import copy_workspace, stock_checkpoints, with_latest, workspace_of

SCRIPT = Path(__file__).parent / "scripts" / "unchanged_training.py"


def test_a_command_with_a_directory_of_each_run_needs_no_copy(tmp_path: Path) -> None:
    assert workspace_of(["python", "train.py", "--out={dir}"], tmp_path) is None
    assert workspace_of(["python", "train.py"], tmp_path) == tmp_path


def test_a_script_whose_run_directories_are_relocated_runs_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from resumekit.adapters.torch import Checkpointer\n")
    assert workspace_of(["python", "train.py"], tmp_path) is None
    (tmp_path / "train.py").write_text("import resumekit\nresumekit.trace(1)\n")
    assert workspace_of(["python", "train.py"], tmp_path) == tmp_path


def test_a_large_directory_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "any name"
    environment.mkdir()
    (environment / "pyvenv.cfg").touch()
    (environment / "large").write_bytes(bytes(2_000_000))
    monkeypatch.setattr(workspaces, "_LARGEST_MEGABYTES", 1)
    assert workspace_of(["python", "train.py"], tmp_path) == tmp_path
    (tmp_path / "data").write_bytes(bytes(2_000_000))
    with pytest.raises(ConfigurationError, match=r"2 MB, .* Put \{dir\} into the command"):
        workspace_of(["python", "train.py"], tmp_path)


def test_links_out_of_the_directory_are_not_copied(tmp_path: Path) -> None:
    """A script that saves through one would overwrite the user's files."""
    source = tmp_path / "source"
    (source / "inside").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / "env" / "conda-meta").mkdir(parents=True)
    (source / "runs").symlink_to(tmp_path)
    (source / "link").symlink_to("inside")
    assert copy_workspace(source, tmp_path / "copy") == ["runs"]
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == ["inside", "link"]


def test_checkpoints_are_found_by_their_names_in_the_order_of_writing(tmp_path: Path) -> None:
    names = [
        "checkpoint-20/optimizer.pt",
        "run/last.ckpt",
        "global_step8/x",
        "model.pt",
        "checkpoint.pth.tar",
        "step_9.tmp",
    ]
    for index, name in enumerate([*names, "notes.txt"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        for each in (path, path.parent):
            os.utime(each, ns=(10**9 * (index + 1),) * 2)
    found = [str(path.relative_to(tmp_path)) for path in stock_checkpoints([tmp_path], since_ns=0)]
    assert found == [
        "checkpoint-20",
        "run/last.ckpt",
        "global_step8",
        "model.pt",
        "checkpoint.pth.tar",
    ]
    since = stock_checkpoints([tmp_path], since_ns=4 * 10**9)
    assert [path.name for path in since] == ["model.pt", "checkpoint.pth.tar"]
    assert with_latest(["x", "--resume={latest}"], since[-1]) == ["x", f"--resume={since[-1]}"]


@pytest.mark.full  # four imports of torch
def test_an_unchanged_script_resumes_from_its_newest_checkpoint_in_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random kills wait for the first checkpoint, wherever their instants fall."""
    (tmp_path / "train.py").write_text(SCRIPT.read_text())
    monkeypatch.chdir(tmp_path)
    events: list[str] = []
    command = [sys.executable, "train.py", "out"]
    result = prove(
        [*command, "--pause-seconds", "0.05"],
        relaunch=[*command, "--resume", "{latest}"],
        kills=1,
        seed=4,
        on_event=events.append,
    )
    (trial,) = result.trials
    assert trial.outcome is Outcome.EXACT, str(trial.verdict)
    assert trial.verdict is not None
    assert trial.verdict.resumes[0].step >= 4
    assert any("{latest} is checkpoint-00" in line for line in events), events
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
