"""What ``prove`` refuses when resumekit is to be attached, and where the kills fall."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from resumekit.cli import main
from resumekit.errors import CommandFailedError, ConfigurationError, ProveError
from resumekit.launcher import VARIABLE
from resumekit.prove import prove
from resumekit.prove.attaching import (
    default_cadence,
    possible_saves,
    require_save,
    steps_to_interrupt,
)
from resumekit.record.moments import CHECKPOINT, STEP, Moment, TracedProcess

SCRIPTS = Path(__file__).parent / "scripts"


def test_a_loop_of_its_own_is_refused_at_its_first_step_with_the_lines_that_it_needs() -> None:
    events: list[str] = []
    command = [sys.executable, str(SCRIPTS / "unchanged_training.py"), "{dir}"]
    with pytest.raises(ProveError, match=r"no Trainer .* Add the two lines"):
        prove(
            [*command, "--pause-seconds", "3"],  # a minute and more, if it were not ended
            with_resumekit=True,
            timeout_seconds=60,
            on_event=events.append,
        )
    assert any("from resumekit.adapters.torch import Checkpointer" in line for line in events)


def test_a_command_of_resumekit_inside_of_another_is_refused() -> None:
    inner = [sys.executable, "-m", "resumekit.cli", "run", "--dir", "{dir}/run", "--"]
    with pytest.raises(CommandFailedError, match=r"resumekit run: started by .* Leave one"):
        prove([*inner, sys.executable, "-c", "pass"])


def test_prove_is_refused_in_a_process_that_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "list")
    with pytest.raises(ConfigurationError, match="resumekit prove: started by"):
        prove(["anything"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"save_every": 5}, "Add --with-resumekit"),
        ({"with_resumekit": True, "save_every": 0}, "save_every: 0, expected a positive number"),
        ({"with_resumekit": True, "save_every": "soon"}, "save_every: 'soon', expected a positive"),
        ({"with_resumekit": True, "relaunch": ["python", "x.py"]}, "Leave --relaunch out"),
    ],
)
def test_combinations_without_a_meaning_are_refused_with_the_remedy(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        prove(["anything"], **arguments)


def test_the_command_line_passes_steps_and_durations(capsys: pytest.CaptureFixture[str]) -> None:
    for every in ("5", "10min"):
        with pytest.raises(SystemExit, match="2"):
            main(["prove", "--save-every", every, "--", "anything"])
        assert f"save_every: {every} without with_resumekit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("prove --with-resumekit --save-every soon", "save_every: 'soon', expected a positive"),
        ("run --dir runs/a --save-every soon", "save_every: 'soon', expected a positive"),
        ("prove --json nowhere/a.json", "nowhere/a.json: cannot be written"),
        ("prove --html nowhere/a.html", "nowhere/a.html: cannot be written"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_starts(
    words: str,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main([*words.split(), "--", "touch", "started"])
    assert error in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_run_saves_ten_times_and_a_short_one_at_every_step() -> None:
    assert [default_cadence(steps) for steps in (1, 9, 20, 1000)] == [1, 1, 2, 100]


def test_random_kills_fall_from_the_first_save_on() -> None:
    steps = list(range(1, 13))
    assert possible_saves(steps, 5) == [5, 10]
    assert steps_to_interrupt(steps, 5, 7, "job") == list(range(5, 13))
    assert steps_to_interrupt(steps, "10min", 11, "job") == steps
    for every, num_kills in ((5, 8), (13, 1)):
        with pytest.raises(ProveError, match="left from the first save on"):
            steps_to_interrupt(steps, every, num_kills, "job")


def test_a_kill_before_the_first_checkpoint_is_no_proof() -> None:
    step, saved = Moment(STEP, 4), Moment(CHECKPOINT, 4)
    require_save([TracedProcess(0, 0, (step, saved))], "job")
    with pytest.raises(ProveError, match="killed before its first checkpoint"):
        require_save([TracedProcess(0, 0, (step,))], "job")
