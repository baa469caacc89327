"""The judge of the shapes, one for all files here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from judge import ForkedLaunches, Judge


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    launches = ForkedLaunches()
    yield Judge(tmp_path_factory.mktemp("shapes"), launches)
    launches.close()


# Defects that are known: state of functions, classes, globals and objects of libraries is not
# followed, nor are caches, iterators of itertools and environment variables. With strict=True such
# a run starts without a word; the journal reports it after a resume.
KNOWN_DEFECTS = frozenset(
    [
        "cache_of_a_random_number",
        "class_attribute",
        "count_of_itertools",
        "count_that_a_class_method_moves",
        "decorator_around_the_step",
        "environment_variable",
        "function",
        "function_attribute",
        "global_of_another_module",
        "global_step_that_a_schedule_reads",
        "global_that_another_function_changes",
        "lambda_over_a_list",
        "maximum_with_an_epoch",
        "mutable_default_argument",
        "named_tuple",
        "none_until_it_is_an_object",
        "optimizer_with_a_base_optimizer",
        "optimizer_with_slow_weights",
        "second_optimizer_that_is_not_given",
        "variable_that_is_deleted",
    ]
)
JUDGED = ("is_exact", "is_reported")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the shapes of known defects; one that is mended must leave the list."""
    for item in items:
        name = getattr(item, "callspec", None) and item.callspec.id.rpartition(":")[2]
        is_judged = any(f"_{each}" in item.name.partition("[")[0] for each in JUDGED)
        if name in KNOWN_DEFECTS and is_judged:
            item.add_marker(pytest.mark.xfail(reason="functions and classes are not followed"))
