"""Scripts whose optimizer holds more than the model: parameters and gradients from elsewhere."""

from __future__ import annotations

import pytest
from preloads import TORCH
from script_judge import Script, ScriptJudge

PRELOAD = TORCH
CASES = pytest.mark.parametrize("case", ["temperature", "list", "criterion"])
TENSOR_PARALLEL = Script("tensor_parallel.py", num_ranks=2)


def trained_elsewhere(case: str, optimizer: str = "adamw") -> Script:
    return Script("trained_elsewhere.py", ("--case", case, "--optimizer", optimizer))


@pytest.mark.full
@CASES
def test_parameters_outside_of_the_model_are_restored(judge: ScriptJudge, case: str) -> None:
    judge.assert_exact(trained_elsewhere(case))


@pytest.mark.full
@CASES
def test_without_the_optimizer_they_differ(judge: ScriptJudge, case: str) -> None:
    # SGD has no moments: nothing but the values is missing.
    judge.assert_exact(trained_elsewhere(case, "sgd"))
    judge.assert_differs(trained_elsewhere(case, "sgd"), "others", without="optimizer")


@pytest.mark.full
@CASES
def test_strict_starts_with_parameters_outside_of_the_model(judge: ScriptJudge, case: str) -> None:
    script = trained_elsewhere(case).with_arguments("--strict")
    assert not judge.run_uninterrupted(script).require_success().warnings


def test_gradients_that_add_up_over_all_steps_are_restored(judge: ScriptJudge) -> None:
    judge.assert_exact(TENSOR_PARALLEL)


@pytest.mark.full
def test_gradients_that_add_up_are_restored_under_torchrun(judge: ScriptJudge) -> None:
    judge.assert_exact(Script("tensor_parallel.py", num_ranks=2, kills=(8,), torchrun=True))


def test_strict_starts_with_gradients_that_add_up(judge: ScriptJudge) -> None:
    script = TENSOR_PARALLEL.with_arguments("--strict")
    assert not judge.run_uninterrupted(script).require_success().warnings


@pytest.mark.full
def test_another_number_of_threads_is_no_false_alarm_of_the_journal(judge: ScriptJudge) -> None:
    run = judge.run(TENSOR_PARALLEL, num_threads=3).require_success()
    assert run.word == "identical", run.verdict


@pytest.mark.full
def test_without_the_model_tensor_parallel_differs(judge: ScriptJudge) -> None:
    judge.assert_differs(TENSOR_PARALLEL, without="model")
