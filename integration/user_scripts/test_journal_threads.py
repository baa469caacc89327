"""A run on 2 ranks that resumes with another number of threads: other sums, and no false alarm."""

from __future__ import annotations

import re

import pytest
from script_judge import Execution, Script, ScriptJudge, differences

pytestmark = pytest.mark.full

PRELOAD: tuple[str, ...] = ()  # torchrun starts every launch cold
STEPS = range(9, 16)  # saved after step 8, killed inside step 16: these are repeated
THREADS = Script("ddp_threads.py", num_ranks=2, kills=(16,), torchrun=True)
CHANGED = THREADS.with_arguments("--change", "yes")
LINE = r"resumekit: 7 repeated steps: identical; loss differs by up to (\S+), no proof: "


def largest_difference(reference: Execution, run: Execution, rank: int) -> float:
    """The largest relative one of the losses of the repeated steps, by the script's records."""
    relative = []
    for step in STEPS:
        then, now = (
            float.fromhex(execution.records[rank][step]["loss"]) for execution in (reference, run)
        )
        relative.append(abs(then - now) / max(abs(then), abs(now)))
    return max(relative)


@pytest.fixture(scope="module")
def uninterrupted(judge: ScriptJudge) -> Execution:
    return judge.run_uninterrupted(THREADS).require_success()


def test_the_same_number_of_threads_is_exact(judge: ScriptJudge) -> None:
    judge.assert_exact(THREADS)


def test_another_number_of_threads_is_no_warning_but_one_line(
    judge: ScriptJudge, uninterrupted: Execution
) -> None:
    run = judge.run(THREADS, num_threads=2).require_success()
    largest = [largest_difference(uninterrupted, run, rank) for rank in range(2)]
    assert all(0 < each < 1e-3 for each in largest), "the sums are the same: this proves nothing"
    assert not any("inputs" in each for each in differences(uninterrupted, run))
    assert not run.warnings
    found = [re.fullmatch(f"{LINE}threads 1 -> 2", each) for each in run.messages]
    figures = [each[1] for each in found if each]
    assert figures == [f"{largest[0]:.1e}"]
    assert run.verdict is not None
    assert run.verdict.word == "identical"
    assert run.verdict.loss


def test_a_changed_weight_under_the_same_number_of_threads_is_a_warning(
    judge: ScriptJudge, uninterrupted: Execution
) -> None:
    run = judge.run(CHANGED).require_success()
    assert 0 < largest_difference(uninterrupted, run, 0) < 1e-3, "as little as threads change"
    assert run.word == "different"
    assert any("step 9: loss " in each for each in run.warnings), run.messages


def test_a_changed_weight_under_another_number_of_threads_is_no_proof(judge: ScriptJudge) -> None:
    run = judge.run(CHANGED, num_threads=2).require_success()
    assert not run.warnings
    assert run.word == "identical"
