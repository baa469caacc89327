"""Runs a command with callbacks attached, forwards signals to it, and restarts it after a crash."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from resumekit.attach import (
    AttachSettings,
    attached_environment,
    lines_for_loop,
    run_directories,
)
from resumekit.launcher import VARIABLE
from resumekit.launcher.processes import Launch, handled_signals
from resumekit.supervisor.commands import (
    FORWARDED,
    SIGNALS_OF_TORCHRUN,
    check_command,
    forward_signal,
)
from resumekit.supervisor.policy import RestartPolicy, exit_status
from resumekit.supervisor.run_progress import RunProgress, read_progress
from resumekit.supervisor.watcher import watched


class Supervisor:
    """One command, from its first launch to its last.

    Args:
        command: program and arguments.
        settings: what is attached.
        max_restarts: see ``RestartPolicy``.
        on_event: called with one line about what happens.
        sleep: waits for a number of seconds; a signal may end it early.

    Raises:
        ConfigurationError: the command cannot be supervised.
    """

    def __init__(
        self,
        command: Sequence[str],
        settings: AttachSettings,
        *,
        max_restarts: int,
        on_event: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        check_command(command, os.environ, max_restarts=max_restarts)
        self._command = list(command)
        self._settings = settings
        self._policy = RestartPolicy(max_restarts)
        self._on_event = on_event
        self._sleep = sleep
        directory = Path(settings.directory)
        # Beside the run: on the file system that all nodes see, and no part of the run.
        own_name = f".{directory.name}.launcher-{socket.gethostname()}-{os.getpid()}"
        self._private = directory.with_name(own_name)
        self._directories = {directory}
        self._process: Launch | None = None
        self._received: signal.Signals | None = None
        self._has_advised = False

    def run(self) -> int:
        """Launches the command until it needs no restart.

        Returns:
            Its last exit status; 128 plus the number of the signal that ended it.
        """
        with (
            handled_signals(self._receive, *FORWARDED),
            watched(self._command, self._private) as follow,
        ):
            return self._run(follow)

    def _run(self, follow: Callable[[int | None], None]) -> int:
        before = self._progress()
        while True:
            status = self._launch(follow)
            attached = run_directories(self._private)
            self._directories |= attached
            if not attached:
                self._advise()
            if status == 0:
                return 0
            after = self._progress()
            decision = self._policy.after(
                status,
                has_progress=after.has_checkpoint_since(before),
                has_stepped=after.has_stepped_since(before),
                received=None if self._received is None else self._received.name,
            )
            ended = f"exit status {status}, {after}"
            if not decision.restarts:
                self._on_event(f"{ended}: {decision.reason}")
                return status
            self._on_event(f"{ended}: {decision.reason} in {decision.delay_seconds:.0f} s")
            self._sleep_unless_signalled(decision.delay_seconds)
            if self._received is not None:
                return 128 + self._received
            before = after

    def _progress(self) -> RunProgress:
        return read_progress(sorted(self._directories))

    def _launch(self, follow: Callable[[int | None], None]) -> int:
        """The exit status of one launch, of which no process is left."""
        shutil.rmtree(self._private, ignore_errors=True)
        environment = {**SIGNALS_OF_TORCHRUN, **os.environ}
        environment = attached_environment(environment, self._private, self._settings)
        # In a session of its own, so that Ctrl-C comes once: from here.
        self._process = process = Launch(self._command, environment, marker=VARIABLE)
        follow(process.pid)
        if self._received is not None:  # between the check and the start
            self._forward(self._received)
        status = exit_status(process.wait())
        follow(None)
        self._process = None
        if status != 0:
            # Ranks may outlive their launcher, and would keep the run directory.
            process.kill_all()
        return status

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number)
        self._forward(self._received)

    def _forward(self, received: signal.Signals) -> None:
        if self._process is not None:
            forward_signal(received, self._command, self._private, self._process.pid)

    def _advise(self) -> None:
        lines = lines_for_loop(self._private, os.path.relpath(self._settings.directory))
        if lines and not self._has_advised:
            self._has_advised = True
            self._on_event(
                f"no Trainer has trained, so nothing was saved; add to the loop:\n{lines}"
            )

    def _sleep_unless_signalled(self, seconds: float) -> None:
        # time.sleep() continues after a handler has returned, so it is called in short turns.
        while seconds > 0 and self._received is None:
            turn = min(seconds, 0.5)
            self._sleep(turn)
            seconds -= turn
