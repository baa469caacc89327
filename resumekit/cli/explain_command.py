"""``explain``: what an error or a warning means, and what to do about it."""

from __future__ import annotations

import posixpath
import re
from importlib.resources import files
from typing import Annotated

import typer


def explain(code: Annotated[str, typer.Argument(help="The end of a message, as RK-501.")]) -> None:
    """Print what the code of an error or a warning means, and what to do."""
    from rich.console import Console
    from rich.markdown import Markdown

    from resumekit.cli.terminal import print_line
    from resumekit.errors import ConfigurationError, did_you_mean

    page = files("resumekit").joinpath("troubleshooting.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (RK-\d+)\n+(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    wanted = f"RK-{code.upper().strip('[]').removeprefix('RK-')}"
    if wanted not in sections:
        raise ConfigurationError(
            code,
            found="not a code",
            expected=f"one of {min(sections)} to {max(sections)}",
            remedy=did_you_mean(wanted, sections),
        )
    text = re.sub(r"\[([^]]*)\]\(([^)]*)\)", _with_path, sections[wanted])
    console = Console()
    if console.is_terminal:
        console.print(Markdown(f"# {wanted}\n\n{text}"))
    else:
        print_line(" ".join(text.replace("**", "").split()))


def _with_path(link: re.Match[str]) -> str:
    """A link of the page, for who reads it elsewhere."""
    path = posixpath.normpath(posixpath.join("docs/how-to", link[2] or ""))
    return f"{link[1]} ({path.replace('/#', '/troubleshooting.md#')})"
