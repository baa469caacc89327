"""``replay``: repeats steps of a run in a scratch directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from resumekit.cli.arguments import AllowWrites, Directory, ResultFile, TrainingCommand, existing
from resumekit.cli.output_files import require_file_path, write_file

_EXIT_NOT_IDENTICAL = 1


def replay(
    directory: Directory,
    command: TrainingCommand,
    from_step: Annotated[
        int,
        typer.Option(
            "--from",
            metavar="STEP",
            min=0,
            help="Begin from the newest checkpoint at or before this step.",
        ),
    ],
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="How many after --from; default: to the next checkpoint or the journal's end.",
        ),
    ] = None,
    until_differs: Annotated[
        bool,
        typer.Option("--until-differs", help="End after the first step that is not as recorded."),
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(metavar="NEW", help="Keep the run directory of the replay here."),
    ] = None,
    allow_writes: AllowWrites = False,
    json_path: ResultFile = None,
    html_path: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with the losses of both."),
    ] = None,
) -> None:
    """Repeat steps of a run, and compare them with its journal. Changes nothing in the run.

    Exit status: 0 identical, 1 different or not compared, 2 an error.
    """
    from resumekit.replay import replay as run_replay

    existing(directory)
    for file in (json_path, html_path):
        if file is not None:
            require_file_path(file, without=(directory,))
    result = run_replay(
        command,
        directory,
        from_step=from_step,
        num_steps=steps,
        until_differs=until_differs,
        keep=keep,
        allow_writes=allow_writes,
        on_event=lambda line: typer.echo(line, err=True),
    )
    for line in result.lines():
        typer.echo(line)
    if json_path is not None:
        write_file(json.dumps(result.as_plain(), indent=2) + "\n", json_path)
    if html_path is not None:
        from resumekit.html_report import replay_page

        write_file(replay_page(result, directory, command), html_path)
    if not result.is_equal:
        raise typer.Exit(_EXIT_NOT_IDENTICAL)
