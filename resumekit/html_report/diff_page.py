"""The page about two checkpoints: where they differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from resumekit.diff import (
    CheckpointDifference,
    ComponentDifference,
    TensorDifference,
    ValueDifference,
)
from resumekit.html_report.rendering import Headline, Table, render

_MAX_ROWS = 500
_SETTINGS = "Settings of the runs that differ, which do not decide the verdict"
_TONES = {"equal": "good", "differs": "bad", "only in A": "bad", "only in B": "bad"}


def diff_page(found: CheckpointDifference, *, all_rows: bool = False) -> str:
    """The page as one HTML document.

    Args:
        found: the comparison.
        all_rows: whether long tables are whole.
    """
    max_rows = None if all_rows else _MAX_ROWS
    components = Table(
        "Each component: the tensors and values that both have, and the names that one has.",
        ComponentDifference.COLUMNS,
        tuple(each.row for each in found.components),
        numbers=range(2, len(ComponentDifference.COLUMNS)),
        tones=_TONES,
    )
    differing = [each for each in found.components if not each.is_equal and each.only_in is None]
    return render(
        "diff.html.j2",
        title="Comparison of two checkpoints",
        headline=Headline("good" if found.is_equal else "bad", found.verdict, _largest(found)),
        sides=(("A", found.first), ("B", found.second)),
        note=found.prefix_note,
        components=components,
        sections=[_section(each, max_rows) for each in differing],
        settings=list(_value_tables(_SETTINGS, found.settings, max_rows)),
    )


def _largest(found: CheckpointDifference) -> str:
    """Of the first component with tensors that differ, which is the model if it differs."""
    first = next((each for each in found.components if each.tensors), None)
    if first is None:
        return ""
    size = first.tensors[0].size
    by = f", by {size:.3g}" if math.isfinite(size) else ""
    return f"In {first.key}, {first.tensors[0].name} differs most{by}."


def _section(component: ComponentDifference, max_rows: int | None) -> dict[str, Any]:
    sides = (("A", component.only_first), ("B", component.only_second))
    return {
        "key": component.key,
        "tables": [
            *_tensor_tables(component.tensors, max_rows),
            *_value_tables("Values that differ", component.values, max_rows),
            *(
                Table(
                    _caption(f"Names that only {side} has", names, max_rows),
                    (f"only in {side}",),
                    tuple((name,) for name in names[:max_rows]),
                )
                for side, names in sides
                if names
            ),
        ],
    }


def _tensor_tables(tensors: Sequence[TensorDifference], max_rows: int | None) -> Iterator[Table]:
    if tensors:
        yield Table(
            _caption("Tensors that differ, the largest difference first", tensors, max_rows),
            TensorDifference.COLUMNS,
            tuple(each.row for each in tensors[:max_rows]),
            numbers=range(3, len(TensorDifference.COLUMNS)),
            bars=tuple(map(_part, tensors[:max_rows])),
            bar_column="part",
        )


def _value_tables(
    what: str, values: Sequence[ValueDifference], max_rows: int | None
) -> Iterator[Table]:
    if values:
        rows = tuple(each.row for each in values[:max_rows])
        yield Table(_caption(what, values, max_rows), ValueDifference.COLUMNS, rows)


def _caption(what: str, rows: Sequence[Any], max_rows: int | None) -> str:
    if max_rows is None or len(rows) <= max_rows:
        return f"{what}."
    return f"{what}: the first {max_rows} of {len(rows)}; --all shows them all."


def _part(tensor: TensorDifference) -> float | None:
    """The elements that differ, as a part of all."""
    num_elements = math.prod(tensor.shapes[0])
    if tensor.elements is None or not num_elements:
        return None
    return tensor.elements.num_different / num_elements
