"""The templates, filled in: one self-contained HTML document, its headline and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import jinja2

from resumekit.version import __version__

_TEMPLATES = Path(__file__).parent / "templates"

MARK_NAMES = {
    "kill": "stopped",
    "resume": "resumed from here",
    "difference": "first difference",
    "save": "saved",
}


@dataclass(frozen=True)
class Headline:
    """What a page concludes.

    Args:
        tone: chooses colour and border; the text must be enough without it.
        text: the conclusion.
        detail: what it rests on.
    """

    tone: Literal["good", "mild", "bad"]
    text: str
    detail: str


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
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: range = range(0)
    tones: Mapping[str, str] = field(default_factory=dict)
    bars: tuple[float | None, ...] = ()
    bar_column: str = ""


def render(template: str, **values: Any) -> str:
    """A template of this package as a document.

    Args:
        template: its file name.
        **values: what it shows; text is escaped.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    now = datetime.now(timezone.utc)
    return environment.get_template(template).render(
        version=__version__,
        written=f"{now:%Y-%m-%d %H:%M} UTC",
        style=(_TEMPLATES / "style.css").read_text(encoding="utf-8"),
        script=(_TEMPLATES / "chart.js").read_text(encoding="utf-8"),
        mark_names=MARK_NAMES,
        **values,
    )
