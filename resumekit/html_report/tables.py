"""Tables of a page, before the template draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table of text.

    Args:
        caption: what it shows.
        columns: the headings; the first column names the row.
        rows: as many cells as there are columns.
        numbers: the columns that are aligned as numbers, by index.
        tones: how a cell with this text is coloured: ``"good"``, ``"mild"`` or ``"bad"``.
        bars: of each row a bar from 0 to 1, or None, in a last column; empty without the column.
        bar_column: the heading of this column.
    """

    caption: str
    columns: Row
    rows: tuple[Row, ...]
    numbers: range = range(0)
    tones: Mapping[str, str] = field(default_factory=dict)
    bars: tuple[float | None, ...] = ()
    bar_column: str = ""
