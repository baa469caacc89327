"""``resumekit run`` on programs that train several times: each training continues its own run.

They are compared by the weights that the programs themselves write.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from official_scripts import MODULE, output_of
from several_trainings import KILL_AT, MARKER, PROGRAMS

SCRIPT = Path(__file__).with_name("several_trainings.py")
FRAMEWORKS = ["trainer", "lightning"]
KILLED = ["1:57", "2:57", "2:end"]  # in the step after a save, or between two trainings
SAMPLE = {
    ("left_folds", "trainer", "2:57"),
    ("left_folds", "lightning", "2:end"),
    ("finetuning", "lightning", "2:57"),
}


def launch(directory: Path, *words: str, expected: int = 0, **variables: str) -> str:
    command = [*words, sys.executable, str(SCRIPT), *arguments_of(directory)]
    return output_of(command, {**os.environ, **variables}, expected)


def arguments_of(directory: Path) -> list[str]:
    program, framework = directory.name.split("-")
    return [program, framework, "--out", str(directory / "out")]


def run(directory: Path, killed_at: str, *options: str, expected: int = 0) -> str:
    """What ``resumekit run`` and the program write; it is killed once, and launched again."""
    words = (*MODULE, "resumekit.cli", "run", "--dir", str(directory / "run"), *options)
    variables = {KILL_AT: killed_at, MARKER: str(directory / "killed")}
    return launch(directory, *words, "--save-every", "5", "--", expected=expected, **variables)


def results(directory: Path) -> Mapping[str, Any]:
    found: dict[str, Any] = json.loads((directory / "out" / "results.json").read_text())
    return found


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of a program without resumekit; each is run once."""
    known: dict[str, Mapping[str, Any]] = {}

    def found(name: str) -> Mapping[str, Any]:
        if name not in known:
            directory = tmp_path_factory.mktemp("alone") / name
            directory.mkdir()
            launch(directory)
            known[name] = results(directory)
        return known[name]

    return found


CASES = [
    pytest.param(*case, id="-".join(case), marks=() if case in SAMPLE else (pytest.mark.full,))
    for case in ((p, f, k) for p in PROGRAMS for f in FRAMEWORKS for k in KILLED)
    if case[:2] != ("two_fits", "lightning") and case[0] != "left_twins"  # refused, see below
]


@pytest.mark.parametrize(("program", "framework", "killed_at"), CASES)
def test_each_training_continues_its_own_run(
    tmp_path: Path, uninterrupted: Any, program: str, framework: str, killed_at: str
) -> None:
    directory = tmp_path / f"{program}-{framework}"
    directory.mkdir()
    output = run(directory, killed_at)
    assert (directory / "killed").exists()
    assert ("resuming at step 5 from" in output) == (killed_at != "2:end")
    assert results(directory) == uninterrupted(directory.name)


def test_by_its_order_alone_a_fold_continues_the_run_of_another_one(
    tmp_path: Path, uninterrupted: Any
) -> None:
    directory = tmp_path / "left_folds-trainer"
    directory.mkdir()
    run(directory, "2:57", "--max-restarts", "0", expected=128 + 9)
    (directory / "run" / "trainings.json").unlink()
    run(directory, "2:57")
    assert results(directory) != uninterrupted(directory.name)


def test_an_interrupted_run_that_no_training_fits_is_named(tmp_path: Path) -> None:
    directory = tmp_path / "left_rates-lightning"
    directory.mkdir()
    run(directory, "2:57", "--max-restarts", "0", expected=128 + 9)
    (directory / "out" / "results.json").write_text('{"rate 0.2": {}, "rate 0.05": {}}')
    output = run(directory, "2:57", "--max-restarts", "0", expected=2)
    candidate = directory / "run" / "trainer-2"
    expected = f"none of the interrupted runs: {candidate} (rate: was 0.05, now 0.01)"
    assert expected in " ".join(output.split())
    assert to_remove(output) == [str(candidate)]
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "framework", [pytest.param("trainer", marks=pytest.mark.full), "lightning"]
)
def test_two_runs_that_a_training_may_continue_are_named(
    tmp_path: Path, uninterrupted: Any, framework: str
) -> None:
    directory = tmp_path / f"left_twins-{framework}"
    directory.mkdir()
    run(directory, "3:57", "--max-restarts", "0", expected=128 + 9)
    output = run(directory, "3:57", "--max-restarts", "0", expected=2)
    candidates = [directory / "run" / f"trainer-{number}" for number in (2, 3)]
    assert f"{candidates[0]} (the same); {candidates[1]} (the same)" in " ".join(output.split())
    assert to_remove(output) == [*map(str, candidates)]
    rmtree(to_remove(output)[0])
    assert f"training 1 of this launch continues {candidates[1]}" in run(directory, "3:57")
    assert results(directory) == uninterrupted(directory.name)


def to_remove(output: str) -> list[str]:
    """What the remedy in an error says to remove."""
    found = re.findall(r"or remove (.+) if that run", " ".join(output.split()))
    return [] if not found else found[0].split(" or ")


@pytest.mark.full
def test_a_second_fit_of_one_trainer_of_lightning_is_refused(tmp_path: Path) -> None:
    """It would be the same run with another horizon; nothing is trained with another state."""
    directory = tmp_path / "two_fits-lightning"
    directory.mkdir()
    output = " ".join(run(directory, "", "--max-restarts", "0", expected=1).split())
    assert "horizon: epochs=6, expected epochs=3" in output
    assert list(results(directory)) == ["first"]
