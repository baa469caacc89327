"""What the commands print: lines, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement, measure_renderables
from rich.table import Table
from rich.text import Text

from resumekit.printable import printable

_PIPE_WIDTH = 160
_MAX_WIDTH = 4096  # of a table; longer words are no names
_MAX_ROWS = 1000


def print_json(value: Any) -> None:
    """Prints JSON that a program can read, whatever the width of the terminal."""
    console().print(Text(json.dumps(value, indent=2)), soft_wrap=True)


def print_line(text: str, *, to_stderr: bool = False) -> None:
    """Prints text without markup, wrapping or colours."""
    console(to_stderr=to_stderr).print(plain(text), soft_wrap=True)


def plain(text: str, *, style: str = "") -> Text:
    """Text without markup, safe to print: every cell and line with a name or a value in it."""
    return Text(printable(text), style=style)


def print_table(table: Table) -> None:
    """Prints a table; no word of it is broken, and in a pipe no row, whatever the width."""
    terminal = console()
    wide = terminal.options.update(width=_MAX_WIDTH)
    sizes = [
        measure_renderables(terminal, wide, [column.header, *column.cells])
        for column in table.columns
    ]
    slack = [size.maximum - size.minimum for size in sizes]
    # rich narrows the widest column first, below its longest word too: only one is to be narrowed.
    for column, each in zip(table.columns, slack, strict=True):
        column.no_wrap = each < max(slack)
    width = Measurement.get(terminal, wide, table).maximum
    if terminal.is_terminal:
        width = min(width, max(terminal.width, width - max(slack)))
    for line in terminal.render_lines(table, wide.update(width=width)):
        text = Text.assemble(*((each.text, each.style or "") for each in line))
        text.rstrip()
        terminal.print(text, soft_wrap=True)


def new_table(*columns: str) -> Table:
    """A table without lines."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def filled(table: Table, rows: Sequence[Sequence[str]]) -> Table:
    """A table with these rows; of very many the first ones, as they take seconds to lay out."""
    for row in rows[:_MAX_ROWS]:
        table.add_row(*map(plain, row))
    if len(rows) > _MAX_ROWS:
        table.add_row(f"... and {len(rows) - _MAX_ROWS} more; --json shows them")
    return table


def console(*, to_stderr: bool = False) -> Console:
    """The terminal, or what stands for it."""
    # Created per call: a test or a pipe may have replaced the terminal. A pipe has no width, and
    # rich would cut its lines at 80 characters.
    terminal = Console(highlight=False, stderr=to_stderr)
    if terminal.is_terminal:
        return terminal
    return Console(highlight=False, stderr=to_stderr, width=_PIPE_WIDTH)
