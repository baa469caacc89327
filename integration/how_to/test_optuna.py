"""The page on Optuna: a study that is killed in a trial has the trials of an uninterrupted one."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path

import pytest
from how_to_pages import Page, Workplace, difference, num_repeated, without

pytest.importorskip("optuna")

PAGE = Page("optuna")
WAIT = {"HOW_TO_WAIT_AT": "61"}  # step 13 of trial 3; the newest checkpoint is that of step 10
STUDY, STORED, ATTACHED = "python study.py", "python stored_study.py", "resumekit run"


def uninterrupted(directory: Path, start: str) -> Workplace:
    place = Workplace(directory, PAGE)
    place.run(PAGE.command(start))
    return place


def killed_in_a_trial(directory: Path, start: str) -> Workplace:
    """A study whose process is killed in a trial; nothing has started it again."""
    place = Workplace(directory, PAGE)
    started = place.start(PAGE.command(start), **WAIT)
    place.wait_for_ranks(1, started)
    started.kill_tree()
    return place


def trials(place: Workplace) -> list[dict[str, str]]:
    """The rows of the completed trials, as the study has written them."""
    with (place.directory / "trials.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    complete = [row for row in rows if row.get("state", "COMPLETE") == "COMPLETE"]
    names = ("params_lr", "params_width", "value")
    return [{name: row[name] for name in names} for row in complete]


@pytest.mark.full
@pytest.mark.parametrize("start", [STUDY, STORED])
def test_a_killed_study_has_the_trials_of_an_uninterrupted_one(tmp_path: Path, start: str) -> None:
    whole = uninterrupted(tmp_path / "whole", start)
    killed = killed_in_a_trial(tmp_path / "killed", start)
    output = killed.run(PAGE.command(start))
    assert len(trials(whole)) == len({row["value"] for row in trials(whole)}) == 14
    assert trials(killed) == trials(whole)
    assert not difference(whole, killed)
    assert num_repeated(whole, killed) == 3
    shown = PAGE.line("text", "resumekit: resuming").replace("/home/me", str(killed.directory))
    assert output.count(shown) == 1


@pytest.mark.full
def test_without_the_optimizer_the_trials_differ(tmp_path: Path) -> None:
    whole = uninterrupted(tmp_path / "whole", STUDY)
    killed = killed_in_a_trial(tmp_path / "killed", STUDY)
    killed.run(PAGE.command(STUDY), **without("optimizer"))
    assert trials(killed) != trials(whole)
    assert "trained otherwise" in difference(whole, killed)


@pytest.mark.full
def test_another_seed_of_the_sampler_finds_the_run_of_another_trial(tmp_path: Path) -> None:
    place = killed_in_a_trial(tmp_path / "run", STUDY)
    script = place.directory / "study.py"
    script.write_text(script.read_text().replace("seed=0", "seed=1"))
    started = place.start(PAGE.command(STUDY))
    assert started.status() == 1
    assert "StateMismatchError" in started.log.read_text()


@pytest.mark.full
def test_a_study_of_lightning_is_started_again_by_resumekit_run(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    whole = uninterrupted(tmp_path / "whole", ATTACHED)
    killed = Workplace(tmp_path / "killed", PAGE)
    started = killed.start(PAGE.command(ATTACHED), **WAIT)
    try:
        (training,) = killed.wait_for_ranks(1, started)
        killed.release()  # the launch after this one does not wait
        os.kill(training, signal.SIGKILL)
        output = started.output_at_success()
    finally:
        started.kill_tree()
    assert trials(killed) == trials(whole)
    assert len(trials(whole)) == 6
    assert not difference(whole, killed), output
