"""The remedies of ``resumekit run`` for scripts of Lightning that know nothing of it, followed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from followed_remedies import Remedy

pytest.importorskip("lightning")

from official_scripts import LIGHTNING, MODULE, output_of
from several_trainings import KILL_AT, MARKER

from resumekit.storage.store import Store

SCRIPTS = Path(__file__).parents[1] / "user_scripts"
RUN = (*MODULE, "resumekit.cli", "run", "--max-restarts", "0", "--save-every", "5", "--dir")


def launch(*words: object, expected: int = 0, **variables: object) -> str:
    """What a command writes, in one paragraph."""
    given = {name: str(value) for name, value in variables.items()}
    output = output_of([str(word) for word in words], {**os.environ, **given}, expected)
    return " ".join(output.split())


@pytest.mark.full
@pytest.mark.remedy(
    "Remove the argument to train from step {}, or finish that run without resumekit run{}"
)
def test_a_checkpoint_of_another_run_is_not_passed_or_is_finished_by_its_own_means(
    tmp_path: Path, remedy: Remedy
) -> None:
    script = (sys.executable, SCRIPTS / "official" / LIGHTNING, "--output_dir")
    other, run = tmp_path / "other", tmp_path / "run"
    kill = {"KILL_AT_READ": 8 * 13 + 1, "KILL_ONCE": tmp_path / "killed"}
    launch(*script, other, expected=-signal.SIGKILL, **kill)
    argument = ("--ckpt_path", other / "own" / "last.ckpt")
    ours = (*RUN, run, "--", *script, tmp_path / "out")
    text = remedy.in_text(launch(*ours, *argument, expected=2))
    assert re.findall(r"from step (\d+)", text) == ["0"]
    launch(*ours)
    launch(*script, other, *argument)
    assert Store(run).step_names()[0].step == 20
    lines = (other / "losses.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])[0] == 19  # the step before it


@pytest.mark.full
@pytest.mark.remedy("Undo the change; or pass another --dir{}")
def test_a_changed_training_is_undone_or_begins_in_another_directory(
    tmp_path: Path, remedy: Remedy
) -> None:
    """The rate 0.05 is interrupted in a sweep, and then left out of it."""
    first, results = tmp_path / "first", Path("out", "results.json")

    def sweep(directory: Path, run: str = "run", expected: int = 0) -> str:
        script = (SCRIPTS / "several_trainings.py", "left_rates", "lightning")
        kill = {KILL_AT: "2:57", MARKER: tmp_path / "killed"}
        words = (*RUN, directory / run, "--", sys.executable, *script, "--out", directory / "out")
        return launch(*words, expected=expected, **kill)

    sweep(first, expected=128 + signal.SIGKILL)
    done = (first / results).read_text()
    (first / results).write_text('{"rate 0.2": {}, "rate 0.05": {}}')
    text = remedy.in_text(sweep(first, expected=2))
    assert f"remove {first / 'run' / 'trainer-2'} if" in text
    undone, other, removed = (
        Path(shutil.copytree(first, tmp_path / name)) for name in ("undone", "other", "removed")
    )
    (undone / results).write_text(done)
    assert "resuming at step 5" in sweep(undone)
    sweep(other, "another")
    shutil.rmtree(removed / "run" / "trainer-2")
    sweep(removed)
    for directory in (undone, other, removed):
        assert "rate 0.01" in json.loads((directory / results).read_text())
