"""User state in attributes, killed by SIGKILL and compared by what the script itself wrote down."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from resumekit.tracing import INJECT_VARIABLE

SCRIPT = Path(__file__).with_name("user_state_script.py")
KILLS = (6, 11)
KINDS = {"torch": "model/attributes", "trainer": "callbacks/attributes"}


def launch(kind: str, folder: Path, *, kill_at: int = 0, left_out: str = "") -> None:
    if kind == "trainer":
        pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), kind, str(folder), str(kill_at)],
        env={**os.environ, INJECT_VARIABLE: left_out},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (-signal.SIGKILL if kill_at else 0), done.stderr[-3000:]


def steps(folder: Path) -> dict[int, str]:
    """What the last execution of each step did."""
    lines = (folder / "diary").read_text(encoding="utf-8").splitlines()
    return {int(line.split()[0]): line for line in lines}


def killed_and_resumed(kind: str, folder: Path, *, left_out: str = "") -> dict[int, str]:
    for number, step in enumerate(KILLS):
        launch(kind, folder, kill_at=step, left_out=left_out if number else "")
    launch(kind, folder, left_out=left_out)
    return steps(folder)


@pytest.fixture(scope="module", params=KINDS)
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> object:
    folder = tmp_path_factory.mktemp("uninterrupted")
    launch(request.param, folder)
    return request.param, steps(folder)


def test_a_killed_run_continues_exactly(
    expected: tuple[str, dict[int, str]], tmp_path: Path
) -> None:
    kind, uninterrupted = expected
    assert killed_and_resumed(kind, tmp_path) == uninterrupted
    assert len(uninterrupted) == 12


def test_without_the_component_it_does_not(
    expected: tuple[str, dict[int, str]], tmp_path: Path
) -> None:
    kind, uninterrupted = expected
    assert killed_and_resumed(kind, tmp_path, left_out=KINDS[kind]) != uninterrupted


def test_without_what_the_dataset_holds_it_does_not(tmp_path: Path) -> None:
    launch("torch", tmp_path / "whole")
    resumed = killed_and_resumed("torch", tmp_path / "killed", left_out="data/attributes")
    assert resumed != steps(tmp_path / "whole")
