"""One launch of a command: its processes, started together and killed as a whole."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from resumekit.errors import ConfigurationError
from resumekit.launcher import kill_processes, processes_of

_POLL_SECONDS = 0.002
_TAIL_LINES = 15

DIRECTORY_PLACEHOLDER = "{dir}"

_OPTIONS_WITH_VALUE = ("-W", "-X")

# Helpers of multiprocessing end a moment after the process that they serve.
_OUTLIVE_SECONDS = 1.0


class Launch:
    """One launch of a command, in a session of its own.

    Args:
        command: program and arguments.
        environment: the whole environment of the command.
        marker: the variable in it whose value only the processes of this launch have.
        log: stdout and stderr together go to this file.
        directory: the working directory; that of this process without it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        marker: str,
        log: Path,
        directory: Path | None = None,
    ) -> None:
        self.log = log
        self._marker = f"{marker}={environment[marker]}"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environment),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """The exit status of the command (negative: killed by that signal); None while it runs."""
        return self._process.poll()

    def clean_up(self) -> int:
        """Kills what outlives the command by more than a moment.

        Returns:
            How many processes that were.
        """
        deadline = time.monotonic() + _OUTLIVE_SECONDS
        while time.monotonic() < deadline:
            if not processes_of(self._process.pid, self._marker):
                return 0
            time.sleep(_POLL_SECONDS)
        return self.kill()

    def kill(self) -> int:
        """SIGKILLs every process of the launch and waits until all are gone.

        Returns:
            How many processes were there.
        """
        num_killed = kill_processes(self._process.pid, self._marker)
        self._process.wait()
        return num_killed

    def log_tail(self) -> str:
        """The last lines that the command wrote."""
        return tail_of(self.log)


def tail_of(path: Path) -> str:
    """The last lines of a text file; empty when it is not there."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


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
