"""Starting a task: forked from a server that has imported everything."""

from __future__ import annotations

import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from resumekit.errors import CommandFailedError, CommandTimeoutError
from resumekit.launcher.processes import Launch, kill_processes
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


class ForkServer:
    """Forks each task from one warm process.

    Args:
        preload: modules that the server imports before it forks.
        environment: the server's whole environment, inherited by every task.
    """

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = Launch(
            [sys.executable, "-u", "-m", "resumekit.testing.server", *preload],
            environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests = self._process.stdin
        self._replies = self._process.stdout.fileno()
        self._pending = b""
        self._started: list[int] = []
        self._ended: dict[int, int] = {}
        self._await_pid("to import its modules")

    def start(self, task: Task) -> int:
        """The id of a new process, which leads its own session and runs the task."""
        self._requests.write(task.to_json().encode() + b"\n")
        self._requests.flush()
        return self._await_pid("to fork")

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

    def run(
        self,
        tasks: Sequence[Task],
        timeout_seconds: float,
        *,
        expected: Collection[int | None] = (0,),
        peers_seconds: float = float("inf"),
    ) -> dict[int, int]:
        """The exit status of each rank of a job that ended in time, in the order of their ends.

        The other ranks are killed, and all that a rank has started and left behind.

        Args:
            tasks: one for each rank, without the variables that torchrun would set.
            timeout_seconds: how long the ranks may take together.
            expected: exit statuses of a rank that does not fail.
            peers_seconds: how long the other ranks go on after one failed.
        """
        port = free_port()
        pids = []
        for rank, task in enumerate(tasks):
            ranks = distributed_environment(rank, len(tasks), port)
            pids.append(self.start(replace(task, environment={**ranks, **task.environment})))
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + timeout_seconds
        while running := [pid for pid in pids if pid not in statuses]:
            ended = self.wait_any(running, max(deadline - time.monotonic(), 0.0))
            if ended is None:
                break
            pid, status = ended
            statuses[pid] = status
            kill_processes(pid)  # loader workers and the like that outlived it
            if status not in expected:
                # Its peers may notice and fail before its own death is heard of here.
                deadline = min(deadline, time.monotonic() + peers_seconds)
        for pid in running:
            kill_processes(pid)
            self.wait_any([pid], timeout_seconds)
        return {pids.index(pid): status for pid, status in statuses.items()}

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

    def _await_pid(self, what: str) -> int:
        deadline = time.monotonic() + _READY_TIMEOUT_SECONDS
        while not self._started:
            if not self._receive(max(deadline - time.monotonic(), 0.0)):
                raise CommandTimeoutError(
                    "the fork server",
                    found=f"took more than {_READY_TIMEOUT_SECONDS:.0f} seconds {what}",
                )
        return self._started.pop()

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
            else:
                self._started.append(reply["pid"])
        return True
