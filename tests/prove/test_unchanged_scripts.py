"""Scripts in which nothing was changed: an exact resume is exact, and what is forgotten is named.

20 to 30 seconds for each script: three launches that import torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resumekit.prove import Outcome, Trial, prove

SCRIPT = Path(__file__).parent / "scripts" / "unchanged_training.py"


def judged(*options: str, at: tuple[str, ...] = ("step:10",)) -> Trial:
    result = prove([sys.executable, str(SCRIPT), "{dir}", *options], at=at, timeout_seconds=120)
    assert result.num_steps == 20
    (trial,) = result.trials
    assert trial.failure == ""
    return trial


@pytest.mark.full  # four imports of torch; one with resumekit attached is in the plain run
def test_an_exact_resume_of_an_unchanged_script_is_exact() -> None:
    trial = judged(at=("step:10", "step:14"))
    assert trial.outcome is Outcome.EXACT, str(trial.verdict)
    assert trial.verdict is not None
    assert [resume.step for resume in trial.verdict.resumes] == [8, 12]
    assert trial.digests.keys() == {
        *("parameters", "buffers", "optimizer", "modules/AveragedModel")
    }


@pytest.mark.parametrize(
    ("forgotten", "component", "also"),
    [
        ("optimizer", "optimizer", {"parameters", "loss"}),
        pytest.param("averages", "modules/AveragedModel", set(), marks=pytest.mark.full),
        pytest.param("rng", "rng", {"parameters", "loss"}, marks=pytest.mark.full),
        pytest.param("lr", "lr", {"parameters", "loss"}, marks=pytest.mark.full),
        pytest.param("batch", "data", {"parameters", "loss"}, marks=pytest.mark.full),
        pytest.param("buffers", "buffers", set(), marks=pytest.mark.full),
        pytest.param("head", "parameters", {"optimizer", "loss"}, marks=pytest.mark.full),
    ],
)
def test_what_an_unchanged_script_forgets_is_named(
    forgotten: str, component: str, also: set[str]
) -> None:
    trial = judged("--forget", forgotten)
    assert trial.outcome is Outcome.DIVERGED
    assert trial.verdict is not None
    divergence = trial.verdict.divergence
    assert divergence is not None
    assert (divergence.component, divergence.step, divergence.launch) == (component, 9, 1)
    firsts = {one.component: one.step for one in trial.verdict.firsts}
    assert also <= firsts.keys()
    assert all(9 <= step <= 10 for step in firsts.values()), firsts
    assert trial.causes[0].startswith(f"{component}: "), trial.causes


@pytest.mark.full
@pytest.mark.parametrize("forgotten", ["model", "everything"])
def test_weights_that_start_again_are_an_outcome_of_their_own(forgotten: str) -> None:
    trial = judged("--forget", forgotten)
    assert trial.outcome is Outcome.RESTARTED
    assert "WEIGHTS RESTARTED: launch 1" in str(trial.verdict)


@pytest.mark.full
@pytest.mark.parametrize("is_forgotten", [False, True])
def test_of_two_optimizers_the_forgotten_one_is_named(is_forgotten: bool) -> None:
    """They step in turn, so that the relaunched process begins with the second one."""
    command = [sys.executable, str(SCRIPT.with_name("two_optimizers.py")), "{dir}"]
    if is_forgotten:
        command.append("--forget")
    (trial,) = prove(command, at=("step:20",), timeout_seconds=120).trials
    assert trial.verdict is not None
    assert [resume.step for resume in trial.verdict.resumes] == [15]
    if not is_forgotten:
        assert trial.outcome is Outcome.EXACT, str(trial.verdict)
        return
    firsts = [(one.component, one.step) for one in trial.verdict.firsts]
    assert firsts[:2] == [("optimizer/1", 16), ("parameters", 16)]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("is_forgotten", [False, True])
def test_every_rank_of_a_sharded_model_is_compared(kind: str, is_forgotten: bool) -> None:
    command = [sys.executable, str(SCRIPT.with_name("wrapped_training.py")), "{dir}", kind]
    if is_forgotten:
        command.append("--forget")
    (trial,) = prove(command, at=("step:8",), world=2, timeout_seconds=120).trials
    assert trial.verdict is not None
    assert trial.verdict.num_ranks == 2
    assert [resume.step for resume in trial.verdict.resumes] == [5]
    assert (trial.outcome is Outcome.EXACT) == (not is_forgotten), str(trial.verdict)
    if is_forgotten:
        firsts = {one.component: one.step for one in trial.verdict.firsts}
        assert (firsts["optimizer"], firsts["parameters"]) == (6, 6)
