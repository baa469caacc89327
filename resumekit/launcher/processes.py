"""Commands that are started here, and their processes found and killed as a whole, on this node.

A power cut or a scheduler takes all processes of a job at once. torchrun puts its workers into
sessions of their own, so a process group is not the whole job: processes are found by the chain of
parents, by their session, and by a marker in the environment with which they were started.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from resumekit.errors import ConfigurationError

_POLL_SECONDS = 0.002
_GRACE_POLL_SECONDS = 0.02
_GONE_TIMEOUT_SECONDS = 30.0
_TAIL_LINES = 15


class Launch(subprocess.Popen[bytes]):
    """One launch of a command: its processes, started together and killed as a whole.

    Args:
        command: program and arguments.
        environment: the whole environment of the command.
        marker: the variable in it whose value only the processes of this launch have; without it
            a process is not found whose parent has ended and that left the session.
        log: stdout and stderr together go to this file, and stdin is empty.
        **options: of ``subprocess.Popen``. The command leads a session of its own by default.

    Raises:
        ConfigurationError: the command cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        marker: str = "",
        log: Path | None = None,
        **options: Any,
    ) -> None:
        self._log = log
        self._marker = f"{marker}={environment[marker]}" if marker else ""
        options = {"start_new_session": True, **options}
        try:
            with ExitStack() as opened:
                if log is not None:
                    options["stdin"], options["stderr"] = subprocess.DEVNULL, subprocess.STDOUT
                    options["stdout"] = opened.enter_context(log.open("wb"))
                super().__init__(list(command), env=dict(environment), **options)
        except OSError as error:
            raise ConfigurationError(
                command[0], found=f"cannot be started ({error.strerror})", expected="a program"
            ) from error

    def kill_all(self, *, grace_seconds: float = 0.0) -> int:
        """SIGKILLs every process of the launch and waits until all are gone.

        Args:
            grace_seconds: how long they may take to end by themselves.

        Returns:
            How many processes were killed.
        """
        num_killed = kill_processes(self.pid, self._marker, grace_seconds=grace_seconds)
        self.wait()
        return num_killed

    def log_tail(self) -> str:
        """The last lines that the command wrote, as one."""
        return "" if self._log is None else " ".join(tail_of(self._log).split())


def tail_of(path: Path) -> str:
    """The last lines of a text file; empty when it is not there."""
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


@contextmanager
def handled_signals(handler: Callable[..., Any] | int, *signals: int) -> Iterator[None]:
    """Gives signals this handler, as ``signal.signal`` takes it, and their former ones afterwards.

    Args:
        handler: of all of them.
        *signals: their numbers.
    """
    former: dict[int, Any] = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, earlier in former.items():
            signal.signal(number, earlier)


def kill_processes(root: int | None, marker: str = "", *, grace_seconds: float = 0.0) -> int:
    """SIGKILLs all processes of a launch, as ``processes_of`` finds them.

    Returns when none of them runs any more (zombies that nobody reaps do not count).

    Args:
        root: see ``processes_of``.
        marker: see ``processes_of``.
        grace_seconds: how long they may take to end by themselves.

    Returns:
        How many processes were killed.

    Raises:
        TimeoutError: one of them did not die, e.g. it hangs in the kernel.
    """
    # A child whose parent has ended may not be found again, and still runs.
    seen = processes_of(root, marker)
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline and any(map(is_running, seen)):
        time.sleep(_GRACE_POLL_SECONDS)
        seen |= processes_of(root, marker)
    killed: set[psutil.Process] = set()
    deadline = time.monotonic() + _GONE_TIMEOUT_SECONDS
    while found := set(filter(is_running, seen | processes_of(root, marker))):
        seen |= found
        killed |= found
        # The group first: one call reaches all of it at the same instant.
        if root is not None:
            with suppress(ProcessLookupError, PermissionError):  # nobody is left in it
                os.killpg(root, signal.SIGKILL)
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        if time.monotonic() > deadline:
            pids = sorted(each.pid for each in found)
            raise TimeoutError(f"processes {pids} are still there after SIGKILL")
        time.sleep(_POLL_SECONDS)
    return len(killed)


def is_running(process: psutil.Process | int) -> bool:
    """Whether a process, or one with this id, is there and not a zombie."""
    with suppress(psutil.NoSuchProcess):
        each = psutil.Process(process) if isinstance(process, int) else process
        # psutil.Process.is_running: the id may belong to another process by now.
        return each.is_running() and each.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def processes_of(root: int | None, marker: str = "") -> set[psutil.Process]:
    """The living processes of one launch: descendants, session, and all that have the marker.

    Args:
        root: the id of the process that was started, the leader of its session; None: not known.
        marker: ``NAME=value`` in the environment.
    """
    name, _, value = marker.partition("=")
    found: set[psutil.Process] = set()
    with suppress(psutil.NoSuchProcess):
        leader = [] if root is None else [psutil.Process(root)]  # also before it leads a session
        found.update(leader, *(each.children(recursive=True) for each in leader))
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it ended meanwhile, or belongs to somebody else
            is_in_session = root is not None and os.getsid(process.pid) == root
            if is_in_session or (name and process.environ().get(name) == value):
                found.add(process)
    return {each for each in found if each.pid != os.getpid() and is_running(each)}
