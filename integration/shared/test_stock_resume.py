"""The stock scripts run, die and resume by their framework's own means: what the table stands on.

Plain PyTorch and Accelerate alone; ``--full-matrix`` takes all of them.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from resumekit.prove import Outcome, prove

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "integration" / "scripts"
SAMPLE = ("torch", "accelerate")
FRAMEWORKS = (*SAMPLE, "transformers", "lightning", "deepspeed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    all_of_them = metafunc.config.getoption("--full-matrix")
    metafunc.parametrize("framework", FRAMEWORKS if all_of_them else SAMPLE)


@pytest.fixture(autouse=True)
def _as_the_benchmark_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_killed_stock_script_resumes_from_its_frameworks_own_checkpoint(framework: str) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    script = SCRIPTS / f"stock_{framework}.py"
    command = [sys.executable, str(script), "--directory", "{dir}/run", "--save-every", "10"]
    result = prove(command, at=("step:45",), timeout_seconds=120)
    (trial,) = result.trials
    assert trial.verdict is not None
    assert (result.num_steps, trial.failure) == (87, "")
    assert [launch.exit_status for launch in trial.launches] == [-9, 0]
    assert [resume.step for resume in trial.verdict.resumes] == [40]
    # Which of the two is the framework's business; the same script repeats itself either way.
    assert trial.outcome in (Outcome.EXACT, Outcome.DIVERGED)
    assert trial.digests.keys() == {"model", "optimizer", "ema"}
