"""Scripts with state in objects of modules, of a LightningModule, and at module level."""

from __future__ import annotations

import pytest
from preloads import ALL
from script_judge import USER_STATE, Script, ScriptJudge

PRELOAD = ALL
CASES = pytest.mark.parametrize("case", ["anneal", "roll", "flip", "permute"])
DQN = Script("dqn_lightning.py")
EARLY_STOPPING = Script("early_stopping.py")


def script(case: str) -> Script:
    return Script("helper_objects.py", ("--case", case))


@pytest.mark.full
@CASES
def test_an_object_in_an_attribute_is_restored(judge: ScriptJudge, case: str) -> None:
    judge.assert_exact(script(case))


@pytest.mark.full
@CASES
def test_without_user_state_it_differs(judge: ScriptJudge, case: str) -> None:
    judge.assert_differs(script(case), "extra", without=USER_STATE)


@pytest.mark.full
@CASES
def test_strict_starts_with_an_object_in_an_attribute(judge: ScriptJudge, case: str) -> None:
    run = judge.run_uninterrupted(script(case).with_arguments("--strict")).require_success()
    assert not run.warnings


def test_agent_environment_and_replay_buffer_of_a_module_are_restored(judge: ScriptJudge) -> None:
    judge.assert_exact(DQN)


@pytest.mark.full
@pytest.mark.parametrize("batches", ["5", "16"])
def test_a_replay_buffer_is_sampled_again_as_it_was_when_the_epoch_began(
    judge: ScriptJudge, batches: str
) -> None:
    judge.assert_exact(DQN.with_arguments("--batches", batches, "--strict"))


@pytest.mark.full
def test_an_agent_that_each_launch_makes_again_differs(judge: ScriptJudge) -> None:
    judge.assert_differs(DQN.with_arguments("--forget", "yes"), "trained", "agent", "inputs")


@pytest.mark.full
def test_strict_starts_with_an_agent_in_an_attribute(judge: ScriptJudge) -> None:
    run = judge.run_uninterrupted(DQN.with_arguments("--strict")).require_success()
    assert not run.warnings


def test_a_stream_that_reads_a_growing_buffer_differs_and_is_reported(judge: ScriptJudge) -> None:
    late = DQN.with_arguments("--batches", "16", "--late", "yes")
    judge.assert_differs(late, "inputs")
    judge.assert_warns(late, "data")
    judge.assert_strict_refuses(late, "buffer")


@pytest.mark.full
def test_early_stopping_in_extras_is_exact(judge: ScriptJudge) -> None:
    judge.assert_exact(EARLY_STOPPING)
    alone = EARLY_STOPPING.with_arguments("--loop-variables", "off")
    judge.assert_exact(alone)
    judge.assert_differs(alone, "stopper", without="extras")


@pytest.mark.full
def test_early_stopping_of_the_module_is_exact_with_nothing_added(judge: ScriptJudge) -> None:
    bare = EARLY_STOPPING.with_arguments("--bare")
    judge.assert_exact(bare)
    assert not judge.run_uninterrupted(bare.with_arguments("--strict")).require_success().warnings
    judge.assert_differs(bare.with_arguments("--loop-variables", "off"), "stopper")
