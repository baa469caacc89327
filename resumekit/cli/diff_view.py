"""Output of ``diff``: the verdict, then a table for each component that differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from resumekit.cli.views import console, new_table, print_json, reader_at
from resumekit.diff import (
    CheckpointDifference,
    ComponentDifference,
    TensorDifference,
    ValueDifference,
    compare_checkpoints,
)

_MAX_ROWS = 20
_MAX_NAMES = 8


def diff_checkpoints(
    first: Path,
    second: Path,
    *,
    step: str | None,
    components: Sequence[str],
    as_json: bool,
    all_rows: bool,
) -> bool:
    """Compares two checkpoints and prints how they differ.

    Args:
        first: a step directory, or a run directory: its newest readable checkpoint.
        second: the same.
        step: of run directories, this checkpoint.
        components: keys or slots; all if empty.
        as_json: print the result as JSON.
        all_rows: print long lists in full.

    Returns:
        Whether they are equal.

    Raises:
        CheckpointError: one cannot be read, or is not there.
        ConfigurationError: neither has such a component.
    """
    readers = [reader_at(path, step) for path in (first, second)]
    found = compare_checkpoints(*readers, components=components)
    if as_json:
        print_json(found.as_plain())
    else:
        _print(console(), found, None if all_rows else _MAX_ROWS)
    return found.is_equal


def _print(terminal: Console, found: CheckpointDifference, max_rows: int | None) -> None:
    terminal.print(Text(_verdict(found), style="bold"), soft_wrap=True)
    for letter, side in zip("AB", (found.first, found.second), strict=True):
        ranks = f"{side.world_size} rank{'s' * (side.world_size > 1)}"
        terminal.print(Text(f"  {letter}  {side.path}  ({ranks})"), soft_wrap=True)
    if found.prefixes is not None:
        mine, theirs = (repr(prefix) if prefix else "no prefix" for prefix in found.prefixes)
        line = f"  parameter names are matched without their prefix: A has {mine}, B {theirs}"
        terminal.print(Text(line), soft_wrap=True)
    terminal.print(_summary(found.components))
    for component in found.components:
        if not component.is_equal and component.only_in is None:
            _print_component(terminal, component, max_rows)
    if found.settings:
        terminal.print(f"\nsettings of the runs ({len(found.settings)} differ)", style="bold")
        _print_values(terminal, found.settings, max_rows)


def _verdict(found: CheckpointDifference) -> str:
    keys = [component.key for component in found.components if not component.is_equal]
    num_tensors = sum(component.num_tensors for component in found.components)
    num_values = sum(component.num_values for component in found.components)
    if not keys:
        return f"EQUAL: {num_tensors} tensors and {num_values} other values, bit for bit"
    equal = len(found.components) - len(keys)
    rest = f" ({equal} other{'s' * (equal != 1)} equal)" if equal else ""
    return f"DIFFERENT: {', '.join(keys)}{rest}"


def _summary(components: Sequence[ComponentDifference]) -> Table:
    table = new_table("component", "", "tensors", "differ", "values", "differ", "only in A", "in B")
    for each in components:
        if each.only_in is not None:
            table.add_row(Text(each.key), f"only in {'A' if each.only_in == 'first' else 'B'}")
            continue
        counts = (
            *(each.num_tensors, len(each.tensors), each.num_values, len(each.values)),
            *(len(each.only_first), len(each.only_second)),
        )
        word = Text("equal") if each.is_equal else Text("differs", style="bold")
        table.add_row(Text(each.key), word, *(str(count) if count else "-" for count in counts))
    return table


def _print_component(
    terminal: Console, component: ComponentDifference, max_rows: int | None
) -> None:
    terminal.print(Text(f"\n{component.key}", style="bold"))
    if component.tensors:
        terminal.print(_tensor_table(component.tensors[:max_rows]))
        _print_rest(terminal, len(component.tensors), max_rows, "tensors")
    _print_values(terminal, component.values, max_rows)
    for letter, names in (("A", component.only_first), ("B", component.only_second)):
        if names:
            shown = names if max_rows is None else names[:_MAX_NAMES]
            more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
            terminal.print(Text(f"only in {letter}: {', '.join(shown)}{more}"), soft_wrap=True)


def _tensor_table(tensors: Sequence[TensorDifference]) -> Table:
    table = new_table("tensor", "type", "shape", "differ", "max abs", "max rel", "max ULP", "NaN")
    for each in tensors:
        cells = [each.name, _pair(*each.dtypes), _pair(*(str(list(s)) for s in each.shapes))]
        if each.elements is not None:
            found = each.elements
            numbers = (found.max_absolute, found.max_relative, found.max_ulp)
            cells += [str(found.num_different), *map(_number, numbers), str(found.num_nan or "")]
        table.add_row(*map(Text, cells))
    return table


def _pair(first: str, second: str) -> str:
    return first if first == second else f"{first} / {second}"


def _number(value: float | int | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def _print_values(
    terminal: Console, values: Sequence[ValueDifference], max_rows: int | None
) -> None:
    if not values:
        return
    table = new_table("value", "A", "B")
    for each in values[:max_rows]:
        table.add_row(Text(each.name), Text(each.first), Text(each.second))
    terminal.print(table)
    _print_rest(terminal, len(values), max_rows, "values")


def _print_rest(terminal: Console, count: int, max_rows: int | None, what: str) -> None:
    if max_rows is not None and count > max_rows:
        terminal.print(f"... and {count - max_rows} more {what}; --all shows them")
