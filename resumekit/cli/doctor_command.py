"""``doctor``: what resumekit will save of a training, and at what cost."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from resumekit.cli.arguments import AllowWrites, AsJson, TrainingCommand

_EXIT_INEXACT = 1


def doctor(
    command: TrainingCommand,
    steps: Annotated[
        int, typer.Option(min=2, metavar="N", help="How many optimizer steps to run.")
    ] = 3,
    allow_writes: AllowWrites = False,
    as_json: AsJson = False,
) -> None:
    """Run a few steps of a training, and say what is saved exactly, what is lost, and the cost.

    Changes none of your files. Exit code 1 if a part would not be restored exactly.
    """
    from resumekit.cli.terminal import print_json, print_line
    from resumekit.doctor import diagnose

    found = diagnose(
        command,
        num_steps=steps,
        allow_writes=allow_writes,
        on_event=lambda line: typer.echo(f"resumekit doctor: {line}", err=True),
    )
    if as_json:
        print_json({**asdict(found), "needed_bytes": found.needed_bytes})
    else:
        for line in found.lines():
            print_line(line)
    if found.inexact:
        raise typer.Exit(_EXIT_INEXACT)
