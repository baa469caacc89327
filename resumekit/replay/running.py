"""Runs a command on a scratch run directory, behind an overlay over the user's files."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from resumekit.errors import ConfigurationError
from resumekit.launcher.processes import Launch, handled_signals, processes_of
from resumekit.replay.isolation import (
    Isolation,
    changed_files,
    list_files,
    offline_environment,
    outermost,
    remove_layer,
)
from resumekit.replay_plan import VARIABLE, ReplayPlan

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_GRACE_SECONDS = 5.0  # of the 10 that docker stop gives

# Takes the environment of the command and a private directory, and gives it more.
Extension = Callable[[Mapping[str, str], Path], dict[str, str]]


class IsolatedCommand:
    """A command whose writes are kept apart, while it runs on a scratch run directory.

    Args:
        command: program and arguments.
        isolation: of the directories whose files stay as they are.

    Attributes:
        obstacle: why no overlay protects them; empty if one does.
        written: the files that the command has written there; None if they are not known.
    """

    def __init__(self, command: Sequence[str], isolation: Isolation) -> None:
        self._command, self._isolation = command, isolation
        self.obstacle = isolation.obstacle()
        self.written: tuple[str, ...] | None = ()

    def run(self, plan: ReplayPlan, extend: Extension | None = None) -> int:
        """The exit status of the command, which has the terminal.

        Args:
            plan: what its run does otherwise.
            extend: gives its environment more.
        """
        scratch, layers = self._isolation.visible, self._isolation.layers
        environment = offline_environment(os.environ, scratch, layers / "launcher")
        if extend is not None:
            environment = extend(environment, layers / "extended")
        environment[VARIABLE] = plan.to_text()
        if not self.obstacle:
            return _run(self._isolation.command(self._command), environment)
        before = list_files(self._isolation.directories, but=scratch)
        status = _run(self._command, environment)
        after = list_files(self._isolation.directories, but=scratch)
        self.written = None if before is None or after is None else changed_files(before, after)
        return status


@contextmanager
def isolated(
    command: Sequence[str],
    directories: Iterable[Path],
    scratch: Path | None,
    *,
    example: str,
    allow_writes: bool,
) -> Iterator[tuple[IsolatedCommand, Path]]:
    """A command that has not begun, and its run directory; what it has written goes at the end.

    Args:
        command: program and arguments.
        directories: whose files stay as they are.
        scratch: an empty directory that stays; None for one that is removed.
        example: of the command line, for the error where there is no command.
        allow_writes: where the kernel allows no overlay, run without one.

    Raises:
        ConfigurationError: there is no such program, or the kernel allows no overlay.
        SystemExit: SIGTERM or SIGHUP came, which the command has received too, and has ended.
    """
    _require_program(command, example)
    # What is ignored, as under nohup, stays so.
    ending = [each for each in _ENDING if signal.getsignal(each) != signal.SIG_IGN]
    with handled_signals(_end, *ending), _directories(scratch) as (run_directory, layers):
        found = IsolatedCommand(command, Isolation(outermost(directories), layers, run_directory))
        if found.obstacle and not allow_writes:
            raise ConfigurationError(
                "overlay",
                found=f"not possible here ({found.obstacle}), so the command could change your "
                "files",
                remedy="Pass --allow-writes, in a copy of this directory if its files matter",
            )
        yield found, run_directory


def _require_program(command: Sequence[str], example: str) -> None:
    if not command:
        raise ConfigurationError(
            "command",
            found="nothing to run",
            remedy=f"Put it behind --, as in: resumekit {example} -- python train.py",
        )
    if shutil.which(command[0]) is None:
        raise ConfigurationError(command[0], found="no such program", expected="a program")


@contextmanager
def _directories(kept: Path | None) -> Iterator[tuple[Path, Path]]:
    """A run directory, and an empty one for layers; both are removed afterwards."""
    scratch = kept or Path(tempfile.mkdtemp(prefix="resumekit-run-"))
    layers = Path(tempfile.mkdtemp(prefix="resumekit-layers-"))
    try:
        yield scratch, layers
    finally:
        for layer in layers.iterdir():
            remove_layer(layer)
        shutil.rmtree(layers, ignore_errors=True)
        if kept is None:
            shutil.rmtree(scratch, ignore_errors=True)


class _EndedError(SystemExit):
    """A signal ends this process, after its clean-up.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def _end(number: int, frame: FrameType | None) -> None:
    for each in _ENDING:  # nothing interrupts the clean-up
        signal.signal(each, signal.SIG_IGN)
    raise _EndedError(number)


def _run(words: Sequence[str], environment: dict[str, str]) -> int:
    environment = {**environment, "PYTHONUNBUFFERED": "1"}
    launch = Launch(words, environment, marker=VARIABLE, start_new_session=False)
    with handled_signals(signal.SIG_IGN, signal.SIGINT):  # Ctrl-C is for the command, a debugger
        try:
            return launch.wait()
        except _EndedError as ended:
            # To all of its processes: a shell or another launcher may forward no signal.
            for each in processes_of(launch.pid, f"{VARIABLE}={environment[VARIABLE]}"):
                with suppress(ProcessLookupError):
                    os.kill(each.pid, ended.number)
            launch.kill_all(grace_seconds=_GRACE_SECONDS)
            raise
