"""``report``: one HTML file about a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from resumekit.cli.arguments import AsJson, Directory
from resumekit.cli.history_command import facts_of
from resumekit.cli.output_files import require_file_path, write_file


def report(
    directory: Directory,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The HTML file; default DIR's name plus .html."
        ),
    ] = None,
    png: Annotated[
        bool, typer.Option("--png", help="Also write a picture of the page; needs Chromium.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML file about a run. Changes nothing in the run directory.

    Exit code 1 if it shows a checkpoint that cannot be used.
    """
    from resumekit.cli.terminal import print_json
    from resumekit.html_report import run_page
    from resumekit.html_report.run_page import headline

    facts = facts_of(directory)
    file = output or Path(f"{directory.resolve().name}.html")
    require_file_path(file, without=(directory,))
    write_file(run_page(facts), file, png=png, to_stderr=as_json)
    if as_json:
        verdict = headline(facts)
        rows = [
            {"name": each.name, "num_bytes": each.num_bytes, "problem": each.problem or None}
            for each in facts.checkpoints
        ]
        found = {"page": str(file), "verdict": verdict.text, "detail": verdict.detail}
        rest = {"checkpoints": rows, "problems": facts.problems}
        print_json({"directory": str(directory), **found, **rest})
    if any(checkpoint.problem for checkpoint in facts.checkpoints):
        raise typer.Exit(1)
