"""The templates, filled in: one self-contained HTML document."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import jinja2

import resumekit

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
        version=resumekit.__version__,
        written=f"{now:%Y-%m-%d %H:%M} UTC",
        style=(_TEMPLATES / "style.css").read_text(encoding="utf-8"),
        script=(_TEMPLATES / "chart.js").read_text(encoding="utf-8"),
        mark_names=MARK_NAMES,
        **values,
    )
