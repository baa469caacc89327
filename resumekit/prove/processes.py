"""Every process of one launch: started together, found again, and killed as a whole.

A power cut or a scheduler takes all processes of a job at once. torchrun puts its workers into
sessions of their own, so a process group is not the whole job: processes are found by the chain of
parents, by their session, and by a marker in the environment with which they were started.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from resumekit.errors import ConfigurationError

_PROC = Path("/proc")
_POLL_SECONDS = 0.002
_GONE_TIMEOUT_SECONDS = 30.0
_TAIL_LINES = 15

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


def kill_processes(root: int, marker: str = "") -> int:
    """SIGKILLs a process, its session, its descendants and all that have the marker.

    Returns when none of them runs any more (zombies that nobody reaps do not count).

    Args:
        root: the id of the process that was started, the leader of its own session.
        marker: ``NAME=value`` in the environment of processes that may be neither its descendants
            nor in its session.

    Returns:
        How many processes were found.

    Raises:
        TimeoutError: one of them did not die, e.g. it hangs in the kernel.
    """
    seen: set[int] = set()
    deadline = time.monotonic() + _GONE_TIMEOUT_SECONDS
    while True:
        found = processes_of(root, marker)
        seen |= found
        # The group first: one call reaches all of it at the same instant.
        if found or not _PROC.is_dir():
            with suppress(ProcessLookupError, PermissionError):  # nobody is left in it
                os.killpg(root, signal.SIGKILL)
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # A child whose parent has died already is not found again, and may still be dying.
        if not found and not any(is_running(pid) for pid in seen):
            return len(seen)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(seen)} are still there after SIGKILL")
        time.sleep(_POLL_SECONDS)


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        fields = _stat(pid)
    except OSError:
        return False
    return fields[0] not in "ZX"


def processes_of(root: int, marker: str) -> set[int]:
    """The ids of the living processes of one launch.

    Where there is no ``/proc`` it is empty, and only the process group can be reached.
    """
    if not _PROC.is_dir():
        return set()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            fields = _stat(pid)
            state, parent, session = fields[0], int(fields[1]), int(fields[3])
            if state in "ZX":
                continue
            parents[pid] = parent
            if session == root or (marker and marker.encode() in _environment(entry)):
                found.add(pid)
        except OSError:
            continue  # it ended meanwhile, or belongs to somebody else
    found |= {pid for pid in parents if root in _ancestors(pid, parents)}
    return found - {os.getpid()}


def tail_of(path: Path) -> str:
    """The last lines of a text file; empty when it is not there."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def _stat(pid: int) -> list[str]:
    """State, parent, group, session and so on: what follows the name in ``/proc/<pid>/stat``."""
    text = (_PROC / str(pid) / "stat").read_text()
    return text.rpartition(")")[2].split()  # the name itself may hold parentheses


def _environment(entry: Path) -> list[bytes]:
    return (entry / "environ").read_bytes().split(b"\0")


def _ancestors(pid: int, parents: Mapping[int, int]) -> set[int]:
    """The process itself and its chain of parents."""
    chain: set[int] = set()
    current: int | None = pid
    while current is not None and current not in chain:
        chain.add(current)
        current = parents.get(current)
    return chain


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
