"""The fingerprint shows what has changed since a checkpoint, and what that means."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, lr_scheduler

from resumekit.capture import Severity, differences, fingerprint, state_components
from resumekit.capture.fingerprint import repository_state


def run(*, lr: Any = 0.1, length: int = 10, world_size: int = 1, **settings: Any) -> dict[str, Any]:
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=lr)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, T_max=length)
    components = state_components(model=model, optimizer=optimizer, lr_scheduler=scheduler)
    return fingerprint(world_size=world_size, components=components, settings=settings)


def test_the_same_run_has_no_differences() -> None:
    assert differences(run(), run()) == ()


def test_a_fingerprint_goes_through_json_unchanged() -> None:
    first = run(lr=torch.tensor(0.1), odd=[float("inf"), object(), {1: Path("x")}])
    again = json.loads(json.dumps(first, allow_nan=False))
    assert again == first
    assert differences(again, first) == ()


def test_another_horizon_is_of_a_severity_of_its_own() -> None:
    (found,) = differences(run(length=10), run(length=20))
    assert found.name == "lr_scheduler.horizon.T_max"
    assert (found.then, found.now, found.severity) == (10, 20, Severity.HORIZON)
    assert str(found) == "lr_scheduler.horizon.T_max: was 10, now 20"


def test_the_loops_own_horizon_is_one_too() -> None:
    (found,) = differences(run(horizon={"epochs": 3}), run(horizon={"epochs": 4}))
    assert (found.name, found.severity) == ("horizon.epochs", Severity.HORIZON)


def test_hyperparameters_and_the_world_are_only_reported() -> None:
    found = {d.name: d for d in differences(run(), run(lr=0.2, world_size=2))}
    assert found["world_size"].now == 2
    assert found["optimizer.param_groups[0].lr"].then == 0.1
    assert {each.severity for each in found.values()} == {Severity.REPORTED}


def test_what_only_one_side_has_is_a_difference() -> None:
    (found,) = differences(run(), run(batch_size=4))
    assert (found.name, found.then, found.now) == ("batch_size", None, 4)


def test_versions_and_command_are_there() -> None:
    found = run()
    assert found["versions"]["torch"] == torch.__version__
    assert found["command"] == sys.argv


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True)

    script = tmp_path / "train.py"
    script.write_text("first\n")
    git("init", "--quiet")
    git("add", "train.py")
    git("commit", "--quiet", "-m", "first")
    return script


def test_the_commit_of_a_script_and_whether_it_was_changed(repository: Path) -> None:
    clean = repository_state(repository)
    assert clean is not None
    assert len(str(clean["commit"])) == 40
    assert clean["dirty"] is False
    (repository.parent / "untracked").write_text("")
    assert repository_state(repository) == clean
    repository.write_text("second\n")
    assert repository_state(repository) == {**clean, "dirty": True}


def test_without_a_repository_or_without_git_there_is_no_commit(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert repository_state(tmp_path / "nowhere" / "train.py") is None
    monkeypatch.setenv("PATH", "")
    assert repository_state(repository) is None
