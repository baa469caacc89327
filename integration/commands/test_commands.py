"""The commands as a user types them, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "integration" / "scripts" / "train_torch.py")
COMMAND = [sys.executable, TRAIN, "--epochs", "12"]


def _resumekit(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "resumekit.cli", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
def test_prove_finds_the_example_exact_and_touches_no_directory_of_the_user(
    tmp_path: Path,
) -> None:
    done = _resumekit(
        "prove", "--kills", "2", "--json", "answer.json", "--", *COMMAND, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EXACT" in done.stdout
    (trial,) = json.loads((tmp_path / "answer.json").read_text(encoding="utf-8"))["trials"]
    assert [launch["was_killed"] for launch in trial["launches"]] == [True, True, False]
    assert [path.name for path in tmp_path.iterdir()] == ["answer.json"]


@pytest.mark.full
def test_prove_catches_an_optimizer_that_was_not_restored(tmp_path: Path) -> None:
    done = _resumekit("prove", "--inject", "optimizer", "--", *COMMAND, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "caught" in done.stdout
    assert "EXACT" not in done.stdout


@pytest.mark.full
def test_prove_says_no_to_a_script_that_starts_over_each_time(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    # A directory of its own for each launch: there is never anything to resume from.
    text = Path(TRAIN).read_text(encoding="utf-8")
    text = text.replace("arguments.directory,", "f'runs/{os.getpid()}',", 1)
    script.write_text(text.replace("import argparse\n", "import argparse\nimport os\n", 1))
    done = _resumekit(
        "prove", "--kills", "1", "--", sys.executable, "train.py", "--epochs", "12", cwd=tmp_path
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIVERGED" in done.stdout
    assert "a fresh start" in done.stdout or "from the first step" in done.stdout


def test_a_command_that_cannot_be_judged_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    done = _resumekit("prove", "--", sys.executable, "-c", "raise SystemExit(3)", cwd=tmp_path)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "exit status 3" in line
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["stock_transformers", "stock_lightning"])
def test_doctor_examines_a_script_that_knows_nothing_of_it(name: str, tmp_path: Path) -> None:
    script = str(ROOT / "integration" / "scripts" / f"{name}.py")
    done = _resumekit("doctor", "--json", "--", sys.executable, script, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert {key for key, (fidelity, _) in found["capture"].items() if fidelity == "exact"} > {
        *("model", "optimizer", "lr_scheduler", "data", "rng", "progress")
    }
    assert not [*tmp_path.iterdir()]
