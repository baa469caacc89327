"""The environment of a command whose Python processes are to run activations."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resumekit import replay_plan
from resumekit.errors import ConfigurationError
from resumekit.launcher.startup import LIST_NAME

# Names the list of activations. DeepSpeed's launcher exports only variables with a few prefixes to
# other nodes, PYTHON among them: deepspeed 0.19 launcher/runner.py EXPORT_ENVS.
VARIABLE = "PYTHONRESUMEKIT"

_STARTUP = Path(__file__).with_name("startup.py")

# python -I and -E ignore PYTHONPATH, -S imports no sitecustomize.
_AGAINST = "IES"


@dataclass(frozen=True)
class Activation:
    """What a process calls when it has imported a module.

    Args:
        after: the top-level module, e.g. ``torch``.
        call: a function, as ``package.module:name``.
        settings: its one argument: plain JSON values.
    """

    after: str
    call: str
    settings: Mapping[str, Any]


def prepared_environment(
    environment: Mapping[str, str], directory: Path, activations: Sequence[Activation]
) -> dict[str, str]:
    """The environment with which a command runs the activations.

    Args:
        environment: of the command otherwise; the activations that it has already are kept.
        directory: an absolute path; made if missing. It must stay until the command ends, and be
            visible on every node.
        activations: called in this order, after those of the environment.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(_STARTUP, directory / "sitecustomize.py")
    earlier = environment.get(VARIABLE)
    kept = [] if earlier is None else json.loads(Path(earlier).read_text())
    listed = directory / LIST_NAME
    listed.write_text(json.dumps([*kept, *map(asdict, activations)]))
    # An empty entry of PYTHONPATH is the working directory, so no separator may trail.
    paths = filter(None, [str(directory), environment.get("PYTHONPATH")])
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: str(listed)}


def marker_of(directory: Path) -> str:
    """``NAME=value`` that only processes with the environment prepared in a directory have."""
    return f"{VARIABLE}={directory / LIST_NAME}"


def refuse_launched(environment: Mapping[str, str], command: str) -> None:
    """Raises ConfigurationError where a launcher has started this process, unless for a replay.

    Args:
        environment: of this process.
        command: of resumekit, named in the error.

    Raises:
        ConfigurationError: another command of resumekit has started it, and kills, restarts or
            records all processes that it would start.
    """
    if VARIABLE in environment and replay_plan.VARIABLE not in environment:
        raise ConfigurationError(
            command,
            found="started by resumekit run or resumekit prove",
            expected="one of the two for a training command",
            remedy="Leave one out; resumekit prove --with-resumekit attaches as resumekit run does",
        )


def option_against_environment(command: Sequence[str]) -> str | None:
    """The option of a Python command under which no activation runs; None without one."""
    for index, word in enumerate(command):
        if re.fullmatch(r"python[\d.]*", Path(word).name):
            return _option_of(command[index + 1 :])
    return None


def _option_of(words: Sequence[str]) -> str | None:
    for word in words:
        if not word.startswith("-") or word in ("-m", "-c", "-"):
            return None
        letters = word[1:].partition("W")[0].partition("X")[0]
        if not word.startswith("--") and any(letter in letters for letter in _AGAINST):
            return word
    return None
