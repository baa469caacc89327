"""Which tests a plain run has: marks those that it leaves out as ``full``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest


def mark_cells(items: Sequence[pytest.Function], *, whole: bool) -> None:
    """Of a test with the mark `quick`, the cells that it does not name are `full`.

    Raises:
        pytest.UsageError: a pattern names no cell; not raised where only parts were collected.
    """
    used: dict[tuple[Any, str], bool] = {}
    defined_here = {
        item.function for item in items if item.function.__module__ == item.module.__name__
    }
    classes: dict[Any, set[type | None]] = {}
    for item in items:
        for mark in item.iter_markers("quick"):
            cell = item.nodeid.partition("[")[2].removesuffix("]")
            matching = [pattern for pattern in mark.args if _matches(cell, pattern)]
            for pattern in mark.args:
                used.setdefault((item.function, pattern), False)
                used[item.function, pattern] |= pattern in matching
            classes.setdefault(item.function, set()).add(item.cls)
            if not matching:
                item.add_marker("full")
    wrong = [
        f"{function.__qualname__}[{pattern}]"
        for (function, pattern), is_used in used.items()
        # What several suites inherit need not have all its cells in each of them.
        if not is_used and (function in defined_here or len(classes[function]) > 1)
    ]
    if wrong and whole:
        raise pytest.UsageError(f"the mark `quick` names cells that are not there: {wrong}")


def _matches(cell: str, pattern: str) -> bool:
    return fnmatchcase(cell, pattern.replace("[", "[[]"))


def mark_matrices(items: Iterable[pytest.Function]) -> None:
    """Of a suite's matrix, only cells in which each value occurs are in the quick set."""
    matrices: dict[str, list[pytest.Function]] = {}
    for item in items:
        if getattr(item.cls, "matrices", {}).keys() & _params(item).keys():
            matrices.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cells in matrices.values():
        kept = _one_of_each([_values(_params(cell)) for cell in cells])
        for index, cell in enumerate(cells):
            if index not in kept:
                cell.add_marker("full")


def _params(item: pytest.Function) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _values(params: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The values of the factors of a cell, but for its kills: other tests are killed there."""
    (factors,) = params.values()
    return {(name, repr(value)) for name, value in factors.items() if name != "kill"}


def _one_of_each(rows: Sequence[set[tuple[str, str]]]) -> set[int]:
    """Greedily the rows in which every value occurs that occurs in any."""
    missing = set().union(*rows)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda index: len(rows[index] & missing))
        chosen.add(best)
        missing -= rows[best]
    return chosen
