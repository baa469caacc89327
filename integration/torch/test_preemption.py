"""One rank is asked to leave at a random instant: all save one step together, and leave.

``--full-matrix`` makes 50 trials on 2 ranks.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from preemption_workloads import train_until_asked
from preloads import TORCH

from resumekit.prove import compare
from resumekit.testing import Cell, Kit, Run

PRELOAD = TORCH

NUM_TRIALS, ALL_TRIALS = 3, 50
# A signal may come when the run is over; that shows nothing.
MOST_LATE = 0.5


def asked(options: dict[str, Any], **when: Any) -> Cell:
    return Cell(train_until_asked, {"options": options, **when}, world_size=2)


@pytest.fixture(scope="module")
def trials(request: pytest.FixtureRequest) -> int:
    return ALL_TRIALS if request.config.getoption("--full-matrix") else NUM_TRIALS


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_signal_at_any_instant_to_any_rank_loses_nothing(
    kit: Kit, trials: int, async_save: bool
) -> None:
    chance = random.Random(0)
    options = {"dropout": True, "save_every": 2, "epochs": 6, "workers": "0"}
    options["async_save"] = async_save
    plain = asked(options)
    whole = kit.run_uninterrupted(plain)
    assert not whole.failure
    num_late = 0
    for trial in range(trials):
        when: dict[str, Any] = {
            "after_seconds": chance.uniform(0.0, 0.6),
            "rank": chance.randrange(2),
            "name": chance.choice(["SIGTERM", "SIGUSR1", "SIGINT"]),
        }
        run = kit.run_again(kit.new_run(asked(options, **when)), leaves_on=when["name"])
        what = f"trial {trial}, {when}: {run.failure}"
        assert not run.failure, what
        if not run.launches[0].was_killed:
            num_late += 1
            continue
        steps = {path.name for path in _checkpoints(run)}
        run = kit.run_again(replace(run, cell=plain))
        assert not run.failure, what
        verdict = compare(whole.trace, run.trace, expect_resume=True)
        assert verdict.exact, f"{what}: {verdict}"
        (resume,) = verdict.resumes
        assert resume.num_repeated_steps == 0, f"{what}: {resume}"
        assert f"step-{resume.step:08d}" in steps, f"{what}: {resume}, {steps}"
    assert num_late <= MOST_LATE * trials, f"{num_late} of {trials} signals came too late"


def _checkpoints(run: Run) -> list[Path]:
    return sorted((run.directory / "training").glob("step-*"))
