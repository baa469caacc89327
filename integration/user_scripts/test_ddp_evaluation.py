"""An evaluation through a DDP module decides whether its next forward pass broadcasts buffers."""

from __future__ import annotations

import pytest
from preloads import ALL
from script_judge import Script, ScriptJudge

PRELOAD = ALL
CASES = ("before", "resumed", "inside", "accelerate")


def evaluation(case: str) -> Script:
    return Script("ddp_evaluation.py", ("--case", case), num_ranks=2, kills=(7, 11))


@pytest.mark.quick("inside")
@pytest.mark.parametrize("case", CASES)
def test_buffers_of_every_rank_are_exact(judge: ScriptJudge, case: str) -> None:
    judge.assert_exact(evaluation(case))


@pytest.mark.quick("inside")
@pytest.mark.parametrize("case", ["before", "inside", "accelerate"])
def test_without_the_wrappers_state_they_differ(judge: ScriptJudge, case: str) -> None:
    judge.assert_differs(evaluation(case), "buffers", without="model/gradient_buckets")
