"""``run``: trains with an unchanged script, and restarts it after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from resumekit.cli.arguments import TrainingCommand


def run(
    command: TrainingCommand,
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="The run directory.", show_default=False)
    ],
    save_every: Annotated[
        str | None,
        typer.Option(metavar="STEPS|TIME", help="Save every 500 steps, or every 10min."),
    ] = None,
    per_rank: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COMPONENT",
            help="A component of which each rank has its own state, e.g. optimizer. Repeatable.",
        ),
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="Restarts in a row without a new checkpoint; 0 for no restart."),
    ] = 3,
) -> None:
    """Train with an unchanged script of the Trainer or of Lightning, and restart it if it fails."""
    from resumekit.attach import AttachSettings
    from resumekit.supervisor import Supervisor

    path = str(directory.expanduser().absolute())
    settings = AttachSettings(path, cadence_of(save_every), per_rank or ())
    supervisor = Supervisor(
        command,
        settings,
        max_restarts=max_restarts,
        on_event=lambda line: typer.echo(f"resumekit run: {line}", err=True),
    )
    raise typer.Exit(supervisor.run())


def cadence_of(save_every: str | None) -> int | str | None:
    """The value of ``--save-every`` as the options of a run have it: steps, or a duration."""
    if save_every is None or not save_every.isdecimal():
        return save_every
    return int(save_every)
