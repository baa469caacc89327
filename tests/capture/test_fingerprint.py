"""The fingerprint shows what has changed since a checkpoint, and contains no secret."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, lr_scheduler

from resumekit.adapters.torch import Checkpointer
from resumekit.capture.fingerprint import (
    HIDDEN,
    Severity,
    differences,
    fingerprint,
    is_secret_name,
    repository_state,
    without_secrets,
)
from resumekit.capture.slots import state_components
from resumekit.storage.directories import StepName
from resumekit.storage.store import Store


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


def test_a_dtype_and_a_device_are_settings() -> None:
    then, now = run(kind=torch.float32, at=torch.device("cpu")), run(kind=torch.float16, at="cpu")
    (found,) = differences(then, now)
    assert (found.name, found.then, found.now) == ("kind", "torch.float32", "torch.float16")


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


NAMES = (
    "token",
    "hf_token",
    "HF_TOKEN",
    "hub-token",
    "hubToken",
    "api-key",
    "api_key",
    "apikey",
    "wandb.apiKey",
    "OPENAI_API_KEY",
    "password",
    "db.password",
    "passwd",
    "secret",
    "aws_secret_access_key",
    "client-secret",
    "credential",
    "credentials",
)
SETTINGS = (
    "max_tokens",
    "num_keys",
    "monkey",
    "tokenizer",
    "lr",
    "keyboard",
    "model_name",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_like_a_secret_is_one(name: str) -> None:
    assert is_secret_name(name)
    assert is_secret_name(f"--{name}")


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_none(name: str) -> None:
    assert not is_secret_name(name)
    assert without_secrets([f"--{name}", "5", f"--{name}=x"]) == [f"--{name}", "5", f"--{name}=x"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["t.py", "--api-key", "abc", "--lr", "0.1"], ["t.py", "--api-key", "***", "--lr", "0.1"]),
        (["--hf_token=abc", "x"], ["--hf_token=***", "x"]),
        (["-token", "-abc", "x"], ["-token", "-abc", "x"]),  # an option, not its value
        (["--password", "-5", "x"], ["--password", "***", "x"]),
        (["--hub_token="], ["--hub_token=***"]),
        (["wandb.api_key=abc", "lr=1"], ["wandb.api_key=***", "lr=1"]),
        (["--use_token", "--lr", "1"], ["--use_token", "--lr", "1"]),
        (["--url", "https://me:pw@host/a"], ["--url", "https://***@host/a"]),
        (["--url=s3://id@host/a?x=1"], ["--url=s3://***@host/a?x=1"]),
        (["https://host/a?api_key=abc&x=1"], ["https://host/a?api_key=***&x=1"]),
        (["--push", "hf_abcdefghijklmnop"], ["--push", "***"]),
        (["--key", "a=b"], ["--key", "***"]),
        (["--password", "-a$b"], ["--password", "***"]),
        (["--header", "Authorization: Bearer abc"], ["--header", "Authorization: Bearer ***"]),
        (["--json", '{"api_key": "abc", "lr": "1"}'], ["--json", '{"api_key": "***", "lr": "1"}']),
    ],
)
def test_values_are_hidden_and_nothing_else(words: list[str], expected: list[str]) -> None:
    assert without_secrets(words) == expected


SECRETS = st.text(st.sampled_from("abcXYZ0189_.:/+@=%!$ "), min_size=1).map(lambda t: f"S3CR3T{t}")
OTHERS = st.lists(st.sampled_from(["--lr", "0.1", "train.py", "-v", "a=b", "--url=https://h/p"]))


@st.composite
def commands(draw: Any) -> tuple[list[str], str]:
    name, secret = draw(st.sampled_from(NAMES)), draw(SECRETS)
    form = draw(st.sampled_from(["equals", "next", "assigned", "url", "query"]))
    plain = "".join(each for each in secret if each.isalnum())
    words = {
        "equals": [f"--{name}={secret}"],
        "next": [f"--{name}", secret],
        "assigned": [f"{name}={secret}"],
        "url": [f"https://user:{plain}@host/path"],
        "query": [f"--url=https://host/path?{name}={plain}&x=1"],
    }[form]
    return [*draw(OTHERS), *words, *draw(OTHERS)], secret


@given(commands())
def test_no_secret_survives(command: tuple[list[str], str]) -> None:
    words, _ = command
    found = without_secrets(words)
    assert not any("S3CR3T" in word for word in found)
    assert any(HIDDEN in word for word in found)
    assert without_secrets(found) == found


@given(st.lists(st.text()))
def test_any_words_are_taken_and_as_many_come_out(words: list[str]) -> None:
    assert len(without_secrets(words)) == len(words)


def manifest(directory: Path, **options: Any) -> str:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Checkpointer(directory, model=model, optimizer=optimizer, **options) as checkpointer:
        checkpointer.save()
    assert Store(directory).step_names() == [StepName(0)]
    return (directory / "step-00000000" / "manifest.json").read_text()


def test_the_manifest_holds_the_command_without_secrets_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--hf_token", "S3CR3T", "--epochs", "3"])
    text = manifest(tmp_path / "shown")
    assert "S3CR3T" not in text
    content = json.loads(text)
    assert '["train.py","--hf_token","***","--epochs","3"]' in json.dumps(
        content, separators=(",", ":")
    )
    text = manifest(tmp_path / "left-out", record_command=False)
    assert "train.py" not in text
    assert '"command"' not in text
