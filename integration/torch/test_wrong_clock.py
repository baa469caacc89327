"""A clock that jumps back by years between launches: order comes from steps and attempts alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults_trials import Trial, Trials

from resumekit.record.moments import launch_directory
from resumekit.record.trace import KILL_VARIABLE, TRACE_VARIABLE
from resumekit.storage.directories import StepName
from resumekit.storage.store import Store
from resumekit.testing import DEFAULT_PRELOAD
from resumekit.testing.launchers import ForkServer

PRELOAD = (*DEFAULT_PRELOAD, "resumekit.adapters.torch")
SCRIPT = "import sys, faults_training; faults_training.launch(sys.argv[1], keep_latest=2)"
LIBRARIES = [*Path("/usr/lib").glob("*/faketime/libfaketime.so.1")]


def _launch(trial: Trial, number: int, clock: str, kill: str) -> str:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME": clock,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        TRACE_VARIABLE: str(launch_directory(trial.trace, number)),
        KILL_VARIABLE: kill,
    }
    command = [sys.executable, "-c", SCRIPT, str(trial.run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done.stderr


@pytest.mark.full  # four interpreters with torch
@pytest.mark.skipif(not LIBRARIES, reason="needs libfaketime")
def test_a_clock_that_goes_backwards_changes_no_order(tmp_path: Path, server: ForkServer) -> None:
    trials = Trials(tmp_path, server)
    trial = trials.fresh()
    outputs = [
        _launch(trial, number, clock, kill)
        for number, (clock, kill) in enumerate(
            [("+0d", "step:4"), ("-10y", "step:7"), ("-20y", "step:7"), ("-30y", "")]
        )
    ]
    assert "resuming at step 3" in outputs[1]
    assert "resuming at step 6" in outputs[2]
    assert "resuming at step 6" in outputs[3]
    verdict = trial.judge(trials.reference)
    assert verdict.exact, verdict
    store = Store(trial.run)
    created = [store.open_step(name).manifest.created[:4] for name in store.step_names()]
    assert store.step_names() == [StepName(7), StepName(6)]
    assert created == sorted(created)  # the newest has the earliest time
    assert created[0] < created[1]
