"""The templates, filled in: one self-contained HTML document, its tables, rows of findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import jinja2

from resumekit.prove.causes import Cause, Finding
from resumekit.record.moments import STEP
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


# ---------------------------------------------------------------- findings

_DIGEST_LETTERS = 16  # the shortest digest in a trace


def finding_rows(findings: Iterable[Finding]) -> dict[str, list[dict[str, Any]]]:
    """The rows of causes and of consequences, as ``findings.html.j2`` takes them."""
    rows: dict[str, list[dict[str, Any]]] = {"causes": [], "consequences": []}
    for each in findings:
        kind = "consequences" if each.cause is Cause.CONSEQUENCE else "causes"
        rows[kind].append(_row(each))
    return rows


def causes_in_words(findings: Iterable[Finding]) -> str:
    """Each component with its likely cause, without consequences."""
    causes = [each for each in findings if each.cause is not Cause.CONSEQUENCE]
    return "; ".join(f"{each.component}: {each.cause.value}" for each in causes)


def _row(finding: Finding) -> dict[str, str]:
    where = f"step {finding.moment.step}"
    if finding.moment.kind != STEP:
        where = f"{finding.moment.kind}, {where}"
    leaf, values = next(iter(finding.leaves.items()))
    found, expected = ("absent" if each is None else _short(each) for each in values)
    more = len(finding.leaves) - 1
    return {
        "component": finding.component,
        "where": where,
        "leaf": leaf + (f" and {more} more" if more else ""),
        "found": found,
        "expected": expected,
        "cause": finding.cause.value,
        "evidence": finding.evidence,
    }


def _short(text: str) -> str:
    """A digest cut to what a reader compares, a float as a decimal, a list cut."""
    if text.lstrip("-").startswith("0x"):
        return f"{float.fromhex(text):.9g}"
    text = text.removeprefix("digest ")
    if len(text) >= _DIGEST_LETTERS and all(letter in "0123456789abcdef" for letter in text):
        return f"{text[:8]}…"
    return text if len(text) <= 40 else f"{text[:36]}…"
