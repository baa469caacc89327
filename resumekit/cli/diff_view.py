"""Output of ``diff``: the verdict, then a table for each component that differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from resumekit.cli.output_files import require_file_path, write_file
from resumekit.cli.terminal import console, new_table, plain, print_json, print_table
from resumekit.cli.views import again_if_deleted, is_step, reader_at
from resumekit.diff import (
    CheckpointDifference,
    ComponentDifference,
    TensorDifference,
    ValueDifference,
    compare_checkpoints,
)

_Difference = ComponentDifference | TensorDifference | ValueDifference

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
    page: Path | None,
) -> bool:
    """Compares two checkpoints and prints how they differ.

    Args:
        first: a step directory, or a run directory: its newest readable checkpoint.
        second: the same.
        step: of run directories, this checkpoint.
        components: keys or slots; all if empty.
        as_json: print the result as JSON.
        all_rows: print long lists in full.
        page: the HTML file to write, or None.

    Returns:
        Whether they are equal.

    Raises:
        CheckpointError: one cannot be read, or is not there.
        ConfigurationError: neither has such a component, or the page cannot be written there.
    """
    if page is not None:
        require_file_path(page, without=(first, second))
    found = again_if_deleted(
        lambda: compare_checkpoints(
            reader_at(first, step), reader_at(second, step), components=components
        ),
        named=step is not None or (is_step(first) and is_step(second)),
    )
    if as_json:
        print_json(found.as_plain())
    else:
        _print(console(), found, None if all_rows else _MAX_ROWS)
    if page is not None:
        from resumekit.html_report import diff_page

        write_file(diff_page(found, all_rows=all_rows), page, to_stderr=as_json)
    return found.is_equal


def _print(terminal: Console, found: CheckpointDifference, max_rows: int | None) -> None:
    terminal.print(plain(found.verdict, style="bold"), soft_wrap=True)
    for letter, side in zip("AB", (found.first, found.second), strict=True):
        terminal.print(plain(f"  {letter}  {side}"), soft_wrap=True)
    if found.prefix_note:
        terminal.print(plain(f"  {found.prefix_note}"), soft_wrap=True)
    _print_table(found.components)
    for component in found.components:
        if not component.is_equal and component.only_in is None:
            _print_component(terminal, component, max_rows)
    for component in found.components:
        _print_names(terminal, f"times of {component.key}, not compared", component.from_clock)
    if found.settings:
        terminal.print(f"\nsettings of the runs ({len(found.settings)} differ)", style="bold")
        _print_table(found.settings[:max_rows])
        _print_rest(terminal, len(found.settings), max_rows, "values")


def _print_component(
    terminal: Console, component: ComponentDifference, max_rows: int | None
) -> None:
    terminal.print()
    terminal.print(plain(component.key, style="bold"))
    if component.tensors:
        _print_table(component.tensors[:max_rows])
        _print_rest(terminal, len(component.tensors), max_rows, "tensors")
    if component.values:
        _print_table(component.values[:max_rows])
        _print_rest(terminal, len(component.values), max_rows, "values")
    for letter, names in (("A", component.only_first), ("B", component.only_second)):
        _print_names(terminal, f"only in {letter}", names, all_names=max_rows is None)


def _print_names(
    terminal: Console, what: str, names: Sequence[str], *, all_names: bool = False
) -> None:
    shown = names if all_names else names[:_MAX_NAMES]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    if names:
        terminal.print(plain(f"{what}: {', '.join(shown)}{more}"), soft_wrap=True)


def _print_table(differences: Sequence[_Difference]) -> None:
    table = new_table(*differences[0].COLUMNS)
    for each in differences:
        is_bold = isinstance(each, ComponentDifference) and each.row[1] == "differs"
        table.add_row(*map(plain, each.row), style="bold" if is_bold else None)
    print_table(table)


def _print_rest(terminal: Console, count: int, max_rows: int | None, what: str) -> None:
    if max_rows is not None and count > max_rows:
        terminal.print(f"... and {count - max_rows} more {what}; --all shows them")
