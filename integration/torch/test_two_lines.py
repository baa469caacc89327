"""Scripts of two lines, killed by SIGKILL: what is not passed is found in them, and is exact."""

from __future__ import annotations

import pytest
from agreement_workloads import disagree_on_variables
from preloads import TORCH
from script_judge import Script, ScriptJudge, differences

from resumekit.testing import Cell, Kit

PRELOAD = TORCH
# What each of them has beside the model and its optimizer.
WITHOUT = {
    "module": "lr_scheduler",
    "class": "optimizer",
    "gan": "optimizer/disc",
    "scaler": "grad_scaler",
    "ddp": "optimizer",
}
CASES = pytest.mark.parametrize("case", list(WITHOUT))


def script(case: str) -> Script:
    return Script("two_lines.py", ("--case", case), num_ranks=2 if case == "ddp" else 1)


@pytest.mark.quick("module", "ddp")
@CASES
def test_a_script_of_two_lines_is_exact(judge: ScriptJudge, case: str) -> None:
    judge.assert_exact(script(case))


@pytest.mark.quick("module", "ddp")
@CASES
def test_without_one_of_the_objects_that_were_found_it_differs(
    judge: ScriptJudge, case: str
) -> None:
    reference = judge.run_uninterrupted(script(case)).require_success()
    run = judge.run(script(case), without=WITHOUT[case]).require_success()
    assert any("trained" in line for line in differences(reference, run))


@pytest.mark.full
@CASES
def test_strict_starts_with_a_script_of_two_lines(judge: ScriptJudge, case: str) -> None:
    run = judge.run_uninterrupted(script(case).with_arguments("--strict")).require_success()
    assert not run.warnings
    assert sum("found model" in line for line in run.messages) == 1


def test_ranks_that_find_different_objects_hear_of_it(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(disagree_on_variables, {}, world_size=2)))
    assert run.failure
    for path in run.directory.glob("launch-*.log"):
        text = path.read_text()
        assert "components lr_scheduler: rank 0: nothing; rank 1: " in text, text[-2000:]
