"""``import``: a checkpoint of another program becomes the first step of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_run(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint that another program has written.")
    ],
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="The new run's directory.")],
    step: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Its optimizer step, if it lacks that.")
    ] = None,
    epoch: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="N", help="The epoch that the run continues with, counted from 0."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="How many batches of that epoch were used."),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option("--trust", help="Make objects of any class in it: code that it names is run."),
    ] = False,
) -> None:
    """Make a checkpoint of the Trainer, Lightning, Accelerate or torch.save the start of a run.

    The same training command, with resumekit and this run directory, continues from it.
    """
    from resumekit.cli.terminal import print_line
    from resumekit.cli.views import reader_at
    from resumekit.imports.content import StartPosition
    from resumekit.imports.importing import import_checkpoint
    from resumekit.log import show_messages

    show_messages()
    asked = StartPosition(step, epoch, batch)
    made, origin = import_checkpoint(path.absolute(), directory, asked=asked, trusts=trust)
    lacks = f"; it has no {', '.join(origin.lacks)}" if origin.lacks else ""
    print_line(f"{made}  imported from {origin.source}{lacks}")
    progress = reader_at(Path(made)).manifest.progress
    print_line(f"the run continues with epoch {progress['epoch']}, batch {progress['batch']}")
