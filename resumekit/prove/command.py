"""The command of one launch: its own directory, and its ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from resumekit.errors import ConfigurationError

DIRECTORY_PLACEHOLDER = "{dir}"

_OPTIONS_WITH_VALUE = ("-W", "-X")


def prepared(command: Sequence[str], *, world: int, directory: Path) -> list[str]:
    """Program and arguments of one launch.

    Args:
        command: as the user wrote it; ``{dir}`` in it stands for a directory of each run's own.
        world: ranks; more than one wraps ``python x.py`` into ``torch.distributed.run``.
        directory: what ``{dir}`` becomes.

    Raises:
        ConfigurationError: there is no command, or it cannot be wrapped.
    """
    if not command:
        raise ConfigurationError(
            "command",
            found="nothing to run",
            remedy="Put it behind --, as in: resumekit prove -- python train.py",
        )
    if world < 1:
        raise ConfigurationError("world", found=str(world), expected="at least 1")
    words = [word.replace(DIRECTORY_PLACEHOLDER, str(directory)) for word in command]
    if world == 1:
        return words
    index = _script_index(words)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    return [*words[:index], *launcher, *words[index:]]


def _script_index(words: list[str]) -> int:
    """The index of the script, or of its ``-m``, after the interpreter and its options."""
    index = 1
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-m", "-c"):
        index += 2 if words[index] in _OPTIONS_WITH_VALUE else 1
    is_python = re.fullmatch(r"python[\d.]*", Path(words[0]).name)
    if not is_python or index >= len(words) or words[index] == "-c":
        raise ConfigurationError(
            " ".join(words),
            found="cannot be started on several ranks",
            expected="python <script.py> ... or python -m <module> ...",
            remedy="Leave --world out if the command starts its ranks itself",
        )
    return index
