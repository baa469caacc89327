"""Starting a task: forked from a server that has imported everything, or cold."""

from __future__ import annotations

import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from resumekit.errors import CommandFailedError, CommandTimeoutError
from resumekit.testing.task import Task


def distributed_environment(rank: int, world_size: int, port: int) -> dict[str, Any]:
    """What torchrun would set; nothing for a single process."""
    if world_size == 1:
        return {}
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A port of this machine that nobody listens on now.

    It is below those that Linux gives to connections (ip_local_port_range), of which one may have
    it before rank 0 listens.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


_READY_TIMEOUT_SECONDS = 120.0
_END_TIMEOUT_SECONDS = 10.0
_POLL_SECONDS = 0.005


class Launcher(Protocol):
    """Starts processes and reports when they ended."""

    def start(self, task: Task) -> int:
        """The id of a new process, which leads its own session and runs the task."""
        ...

    def wait_any(self, pids: Sequence[int], timeout_seconds: float) -> tuple[int, int] | None:
        """The id and exit status of a process that ended; None when none did in time."""
        ...

    def close(self) -> None:
        """Kills all processes that are still running."""
        ...


class ForkServer:
    """Forks each task from one warm process.

    Args:
        preload: modules that the server imports before it forks.
        environment: the server's whole environment, inherited by every task.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "resumekit.testing.server", *preload],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin
        self._replies = self._process.stdout.fileno()
        self._pending = b""
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._ready = False
        self._await(lambda: self._ready, _READY_TIMEOUT_SECONDS, "to import its modules")

    def start(self, task: Task) -> int:
        """The id of a new process, which leads its own session and runs the task."""
        self._requests.write(task.to_json().encode() + b"\n")
        self._requests.flush()
        self._await(lambda: bool(self._started), _READY_TIMEOUT_SECONDS, "to fork")
        return self._started.pop()

    def wait_any(self, pids: Sequence[int], timeout_seconds: float) -> tuple[int, int] | None:
        """The id and exit status of a process that ended; None when none did in time."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            for pid in pids:
                if pid in self._ended:
                    return pid, self._ended.pop(pid)
            left = deadline - time.monotonic()
            if left <= 0 or not self._receive(left):
                return None

    def close(self) -> None:
        """Ends the server, which kills what it has started."""
        # A line, because the pipe stays open while a process that was forked meanwhile has it too,
        # such as a worker of a DataLoader.
        with self._process, suppress(BrokenPipeError):  # closes the pipes, then waits
            self._requests.write(b"\n")
            self._requests.flush()
            try:
                self._process.wait(_END_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _await(self, done: Callable[[], bool], timeout_seconds: float, what: str) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not done():
            if not self._receive(max(deadline - time.monotonic(), 0.0)):
                raise CommandTimeoutError(
                    "the fork server", found=f"took more than {timeout_seconds:.0f} seconds {what}"
                )

    def _receive(self, timeout_seconds: float) -> bool:
        """Takes in what the server has said; False when it said nothing in time."""
        readable, _, _ = select.select([self._replies], [], [], timeout_seconds)
        if not readable:
            return False
        received = os.read(self._replies, 1 << 16)
        if not received:
            raise CommandFailedError(
                "the fork server",
                found=f"ended with status {self._process.wait()}",
                remedy="Its messages are on stderr",
            )
        *lines, self._pending = (self._pending + received).split(b"\n")
        for line in lines:
            reply = json.loads(line)
            if "status" in reply:
                self._ended[reply["pid"]] = reply["status"]
            elif "pid" in reply:
                self._started.append(reply["pid"])
            else:
                self._ready = True
        return True


class ColdStart:
    """Starts each task in a fresh interpreter: slow, and free of anything inherited.

    Args:
        environment: the whole environment of every task, before the task's own changes.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, task: Task) -> int:
        """The id of a new process, which leads its own session and runs the task."""
        command = [sys.executable, "-u", "-m", "resumekit.testing.task", task.to_json()]
        # Set here as well as in the task: what the interpreter reads at its start must be there.
        environment = {**self._environment, **task.environment}
        process = subprocess.Popen(
            command,
            env={name: value for name, value in environment.items() if value is not None},
            stdin=subprocess.DEVNULL,
        )
        self._processes[process.pid] = process
        return process.pid

    def wait_any(self, pids: Sequence[int], timeout_seconds: float) -> tuple[int, int] | None:
        """The id and exit status of a process that ended; None when none did in time."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            for pid in pids:
                status = self._processes[pid].poll()
                if status is not None:
                    del self._processes[pid]
                    return pid, status
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Kills all processes that are still running."""
        for process in self._processes.values():
            process.kill()
            process.wait()
