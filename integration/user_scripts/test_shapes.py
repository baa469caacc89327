"""Shapes of keeping state, each a script of its own that is killed twice by SIGKILL.

The shapes are those of ``tests/live/shapes``. Here each launch is a fresh interpreter, the classes
and functions of a shape are in ``__main__``, and no exception and no exit handler runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from cold_launches import ColdLaunches
from judge import Judge, Verdict, assert_verdict

# Saved after steps 9 and 12: the second resume restores what the second launch saved.
KILLS = (10, 13)
SCRIPT = Path(__file__).with_name("shapes_script.py")
SHAPES = (
    "shapes_of_values:float_at_module_level",
    "shapes_of_values:enum_member",
    "shapes_of_values:set_of_integers",
    "shapes_of_values:numpy_generator",
    "shapes_of_objects:dataclass_with_aliases",
    "shapes_of_objects:class_attribute",
    "shapes_of_objects:method_that_changes_its_object",
    "shapes_of_objects:mutable_default_argument",
    "shapes_of_objects:global_that_another_function_changes",
    "shapes_of_loops:generator_that_iterates_over_the_epochs",
    "shapes_of_loops:decorated_training_function",
    "shapes_of_loops:weights_scaled_at_the_start_of_an_epoch",
    "shapes_of_learning:replay_buffer",
    "shapes_of_learning:optimizer_with_a_base_optimizer",
)
NAMED = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.partition(":")[2])


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("scripts"), ColdLaunches())


@pytest.fixture(scope="module")
def judge_of_the_script(tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(tmp_path_factory.mktemp("script"), ColdLaunches(SCRIPT))


def test_a_script_with_all_its_state_at_module_level_is_exact(judge_of_the_script: Judge) -> None:
    assert_verdict(judge_of_the_script.verdict("shapes_script", kills=KILLS), Verdict.EXACT)


@pytest.mark.quick("class_attribute", "enum_member", "replay_buffer")
@NAMED
def test_a_killed_script_is_exact(judge: Judge, shape: str) -> None:
    assert_verdict(judge.verdict(shape, kills=KILLS), Verdict.EXACT)


@pytest.mark.full
@NAMED
def test_without_loop_variables_it_differs(judge: Judge, shape: str) -> None:
    assert judge.verdict(shape, kills=KILLS[:1], loop_variables="off").difference


@pytest.mark.full
def test_a_script_without_state_is_exact_under_strict(judge: Judge) -> None:
    judgement = judge.verdict("shapes_without_state:meters", kills=KILLS)
    assert (judgement.verdict, judgement.noise) == (Verdict.EXACT, []), str(judgement)
