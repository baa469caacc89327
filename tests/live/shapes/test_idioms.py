"""Idioms of real scripts, crashed and launched again: each is exact with nothing added.

What a loop carries from step to step was read from the sources of such scripts once; here each way
of carrying it is a training whose next steps depend on it.
"""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest
import shapes_idiom_counts
import shapes_idiom_memory
import shapes_idiom_objects
from judge import Judge, Verdict, assert_verdict

# Those of a plain run, one for each way of keeping state.
QUICK = frozenset(
    {
        "curriculum_by_a_count",
        "rate_that_the_script_decays",
        "batch_size_that_an_epoch_halves",
        "sums_of_an_epoch_that_weigh_the_next",
        "argument_of_the_launch",
        "hidden_states_in_a_tuple",
        "memory_bank_by_index",
        "sets_of_active_learning",
        "pool_whose_result_is_used",
        "count_that_a_class_method_moves",
        "decorator_around_the_step",
        "global_step_that_a_schedule_reads",
        "agent_in_a_runner",
    }
)


def idioms_of(module: ModuleType) -> list[str]:
    """The trainings of a file."""
    return [
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if [*inspect.signature(function).parameters] == ["directory", "record", "options"]
    ]


MODULES = (shapes_idiom_counts, shapes_idiom_memory, shapes_idiom_objects)
IDIOMS = [f"{module.__name__}:{name}" for module in MODULES for name in idioms_of(module)]
EACH = pytest.mark.parametrize(
    "idiom",
    [
        pytest.param(each, marks=[] if each.partition(":")[2] in QUICK else [pytest.mark.full])
        for each in IDIOMS
    ],
)


@EACH
def test_an_idiom_is_exact_with_nothing_added(judge: Judge, idiom: str) -> None:
    assert_verdict(judge.verdict(idiom), Verdict.EXACT)


@EACH
def test_without_its_variables_it_differs(judge: Judge, idiom: str) -> None:
    judgement = judge.verdict(idiom, loop_variables="off")
    assert judgement.difference, str(judgement)
