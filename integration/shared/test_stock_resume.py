"""What each framework's own resume loses, found in scripts without a line of resumekit.

The stock scripts resume as their framework's documentation recommends; what they lose is the third
column of the README's table. Their twins resume through resumekit, and are exact.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from untraced import untraced

from resumekit.prove import Outcome, ProveResult, prove

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "integration" / "scripts"

# The batch is wrong, and with it everything that follows from it.
OTHER_BATCHES = ("data", {"rng", "parameters", "optimizer", "loss", "modules/AveragedModel"})


class Loss(NamedTuple):
    """What one framework's own resume loses in the middle of an epoch."""

    framework: str
    first: str  # the likely cause: what differs first
    also: set[str]  # everything else that differs later
    world: int = 1


LOSSES = (
    Loss("torch", *OTHER_BATCHES),
    Loss("accelerate", *OTHER_BATCHES),
    Loss("lightning", *OTHER_BATCHES),
    # Weights and optimizer are exact; the averaged weights are reinitialised.
    Loss("transformers", "modules/AveragedModel", set()),
    # The right batches with other dropout masks. The parameters are the partitions of ZeRO.
    *(
        Loss(
            "deepspeed",
            "rng",
            {
                *("parameters", "optimizer", "loss"),
                *("modules/DeepSpeedEngine", "modules/AveragedModel"),
            },
            world,
        )
        for world in (1, 2)
    ),
)
FRAMEWORKS = ("torch", "accelerate", "lightning", "transformers", "deepspeed")


@pytest.fixture(autouse=True)
def _as_the_benchmark_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def judged(script: Path, world: int = 1) -> ProveResult:
    command = [sys.executable, str(script), "--directory", "{dir}/run", "--save-every", "10"]
    return prove(command, at=("step:45",), world=world, timeout_seconds=240)


@pytest.mark.quick("torch-1")
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.framework}-{loss.world}")
def test_what_a_stock_resume_loses_is_found_without_a_line_in_the_script(
    loss: Loss, tmp_path: Path
) -> None:
    pytest.importorskip(loss.framework)
    script = untraced(SCRIPTS / f"stock_{loss.framework}.py", tmp_path)
    result = judged(script, loss.world)
    (trial,) = result.trials
    assert (result.num_steps, trial.failure, trial.outcome) == (87, "", Outcome.DIVERGED)
    assert [launch.was_killed for launch in trial.launches] == [True, False]
    verdict = trial.verdict
    assert verdict is not None
    assert [resume.step for resume in verdict.resumes] == [40]
    assert verdict.divergence is not None
    assert (verdict.divergence.component, verdict.divergence.step) == (loss.first, 41)
    firsts = {one.component: one.step for one in verdict.firsts}
    assert firsts.keys() == {loss.first, *loss.also}
    # The average of step 41 was made after that step was recorded.
    assert {step for name, step in firsts.items() if name != "modules/AveragedModel"} <= {41}


@pytest.mark.full
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_twin_that_resumes_through_resumekit_is_exact_to_the_recorder_too(
    framework: str,
) -> None:
    pytest.importorskip(framework)
    (trial,) = judged(SCRIPTS / f"train_{framework}.py").trials
    assert trial.outcome is Outcome.EXACT, str(trial.verdict)
    assert trial.recorded is not None
    assert (trial.recorded.exact, trial.recorded.num_steps) == (True, 87)
    assert [resume.step for resume in trial.recorded.resumes] == [40]


@pytest.mark.full
@pytest.mark.parametrize("framework", ["torch", "accelerate"])
def test_a_script_s_trace_and_the_recorder_agree(framework: str) -> None:
    (trial,) = judged(SCRIPTS / f"stock_{framework}.py").trials
    assert trial.verdict is not None
    assert trial.recorded is not None
    for verdict in (trial.verdict, trial.recorded):
        assert verdict.divergence is not None
        assert (verdict.divergence.component, verdict.divergence.step) == ("data", 41)
    assert trial.digests.keys() == {"model", "optimizer", "ema"}
