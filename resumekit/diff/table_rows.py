"""The tables of a comparison as text, for the terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from resumekit.diff.result import ComponentDifference, TensorDifference, ValueDifference

Row = tuple[str, ...]

COMPONENT_COLUMNS = (
    *("component", "", "tensors", "differ", "values", "differ", "only in A", "only in B"),
)
TENSOR_COLUMNS = ("tensor", "type", "shape", "differ", "max abs", "max rel", "max ULP", "NaN")
VALUE_COLUMNS = ("value", "A", "B")


def component_rows(components: Iterable[ComponentDifference]) -> Iterator[Row]:
    """A row for each component; the second cell is its verdict."""
    for each in components:
        if each.only_in is not None:
            side = "A" if each.only_in == "first" else "B"
            yield each.key, f"only in {side}", "", "", "", "", "", ""
            continue
        counts = (
            *(each.num_tensors, len(each.tensors), each.num_values, len(each.values)),
            *(len(each.only_first), len(each.only_second)),
        )
        word = "equal" if each.is_equal else "differs"
        yield each.key, word, *(str(count) if count else "-" for count in counts)


def tensor_rows(tensors: Iterable[TensorDifference]) -> Iterator[Row]:
    """A row for each tensor; cells are empty where shapes or types cannot be compared."""
    for each in tensors:
        kinds = _pair(*each.dtypes), _pair(*(str(list(shape)) for shape in each.shapes))
        found = each.elements
        if found is None:
            yield each.name, *kinds, "", "", "", "", ""
            continue
        numbers = (found.max_absolute, found.max_relative, found.max_ulp, found.num_nan or None)
        yield each.name, *kinds, str(found.num_different), *map(_number, numbers)


def value_rows(values: Iterable[ValueDifference]) -> Iterator[Row]:
    """A row for each value."""
    for each in values:
        yield each.name, each.first, each.second


def _pair(first: str, second: str) -> str:
    return first if first == second else f"{first} / {second}"


def _number(value: float | int | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}"
