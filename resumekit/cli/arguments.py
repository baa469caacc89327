"""Arguments that commands of several modules take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from resumekit.errors import ConfigurationError
from resumekit.imports.recognition import recognise

Directory = Annotated[Path, typer.Argument(metavar="DIR", help="A run directory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
TrainingCommand = Annotated[
    list[str], typer.Argument(help="The training command, e.g. python train.py.")
]
ResultFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")
]
AllowWrites = Annotated[
    bool,
    typer.Option(
        "--allow-writes", help="Run even where an overlay cannot protect the working directory."
    ),
]


def existing(path: Path) -> Path:
    """The path of a run directory, or of a step in one, as a command was given it.

    Raises:
        ConfigurationError: there is no directory, or it is a checkpoint of another program.
    """
    other = recognise(path)
    if other is not None:
        raise ConfigurationError(
            str(path),
            found=f"{other}",
            expected="the run directory of a job",
            remedy=f"Make it the start of a run: {other.command()}",
        )
    if not path.is_dir():
        found = "not a directory" if path.exists() else "no such directory"
        raise ConfigurationError(str(path), found=found, expected="the run directory of a job")
    return path


def bytes_of(text: str) -> int:
    """A size such as ``5GB``, ``512MiB`` or ``1000``, in bytes.

    Raises:
        ConfigurationError: it is none, or less than a byte.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    power = " KMGT".index((match[2] or " ").upper()) if match else 0
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** power) if match else 0
    if not size:
        raise ConfigurationError(repr(text), found="no size", expected="a size such as 5GB")
    return size
