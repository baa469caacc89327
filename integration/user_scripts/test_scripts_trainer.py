"""Scripts of the Trainer with state in loss modules, dicts, callbacks and large tensors."""

from __future__ import annotations

import pytest
from preloads import ALL
from script_judge import USER_STATE, Script, ScriptJudge

PRELOAD = ALL
CASES = pytest.mark.parametrize("case", ["softmax", "heads", "callback", "queue"])


def script(case: str, optimizer: str = "adamw") -> Script:
    return Script("trainer_objects.py", ("--case", case, "--optimizer", optimizer))


@pytest.mark.quick("callback")
@CASES
def test_state_in_attributes_is_restored_with_nothing_added(judge: ScriptJudge, case: str) -> None:
    judge.assert_exact(script(case))


@pytest.mark.quick("callback")
@CASES
def test_strict_starts_with_state_in_attributes(judge: ScriptJudge, case: str) -> None:
    run = judge.run_uninterrupted(script(case).with_arguments("--strict")).require_success()
    assert not run.warnings


@pytest.mark.quick("callback-scale")
@pytest.mark.parametrize(("case", "field"), [("callback", "scale"), ("queue", "queue")])
def test_without_user_state_it_differs(judge: ScriptJudge, case: str, field: str) -> None:
    judge.assert_differs(script(case), field, without=USER_STATE)


@pytest.mark.full
@pytest.mark.parametrize("case", ["softmax", "heads"])
def test_without_the_optimizer_and_user_state_it_differs(judge: ScriptJudge, case: str) -> None:
    # SGD has no moments: nothing but the values is missing.
    judge.assert_exact(script(case, "sgd"))
    judge.assert_differs(script(case, "sgd"), "others", without=f"optimizer,{USER_STATE}")
