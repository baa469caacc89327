"""Shapes of keeping state on two ranks under torchrun, whose whole process tree is killed twice.

Each rank has its own data, so what it carries from its losses is another value on each rank.
"""

from __future__ import annotations

import pytest
from cold_launches import ColdLaunches
from judge import Judge, Verdict, assert_verdict

KILLS = (10, 13)
SHAPES = (
    "shapes_of_values:float_assigned_in_each_step",
    "shapes_of_values:list_of_the_first_rank",
    "shapes_of_values:numpy_array_rolled_in_place",
    "shapes_of_values:hidden_state_detached",
    "shapes_of_objects:helper_object",
    "shapes_of_objects:class_attribute",
    "shapes_of_objects:closure_with_nonlocal",
    "shapes_of_loops:epoch_in_a_function",
    "shapes_of_learning:average_of_the_weights_by_hand",
    "shapes_of_learning:replay_buffer",
)
NAMED = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.partition(":")[2])


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("ranks"), ColdLaunches(num_ranks=2))


@pytest.mark.quick("list_of_the_first_rank")
@NAMED
def test_each_rank_continues_with_its_values(judge: Judge, shape: str) -> None:
    assert_verdict(judge.verdict(shape, kills=KILLS), Verdict.EXACT)


@pytest.mark.full
@NAMED
def test_without_loop_variables_it_differs(judge: Judge, shape: str) -> None:
    assert judge.verdict(shape, kills=KILLS[:1], loop_variables="off").difference


@pytest.mark.full
def test_a_loop_without_state_is_exact_under_strict(judge: Judge) -> None:
    judgement = judge.verdict("shapes_without_state:meters", kills=KILLS)
    assert (judgement.verdict, judgement.noise) == (Verdict.EXACT, []), str(judgement)
