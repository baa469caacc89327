"""The fork server: imports the frameworks once and forks a process for each task.

It speaks JSON lines: a task on stdin gives ``{"pid": ...}``, and the end of a process gives
``{"pid": ..., "status": ...}``. Its own id says that it is ready. When stdin closes it kills what
it has started and leaves.

It must stay free of threads, so it imports and never computes: a forked child inherits locks, but
not the threads that would release them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import select
import signal
import sys
from collections.abc import Sequence

from resumekit.launcher.processes import kill_processes
from resumekit.testing.task import Task


def main(preload: Sequence[str]) -> None:
    """Serves until stdin closes; in a forked child, runs the task and returns.

    The child returns here, at the bottom of the stack, so that it ends like any other
    interpreter: exit handlers run, and an uncaught exception prints its traceback. What is left out
    where the task returned is the last act, in which an interpreter takes its modules apart: all of
    their pages would be copied for it, some 0.4 seconds of a launch.
    """
    end = _QuickEnd()
    replies = os.dup(1)
    os.dup2(2, 1)  # what an import prints must not be taken for a reply
    gc.disable()  # hardly anything that an import makes is garbage: a quarter of its time
    for name in preload:
        importlib.import_module(name)
    # A child that ends collects garbage; without this it would walk, and so copy, every page of the
    # imported modules: about a second per child with torch alone.
    gc.freeze()
    gc.enable()
    _reply(replies, pid=os.getpid())  # ready
    task = _serve(replies)
    if task is None:
        os._exit(0)  # nothing is left to do, and a framework's exit handler may wait
    _reseed()
    task.run()
    end.is_due = True


class _QuickEnd:
    """Ends this process when every exit handler has run; to be made before any other is there."""

    def __init__(self) -> None:
        self.is_due = False
        atexit.register(self._end)

    def _end(self) -> None:
        if self.is_due:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)


def _serve(replies: int) -> Task | None:
    """Forks until stdin closes or gives an empty line; in a child, the task that it is to run."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    children: set[int] = set()
    pending = b""
    while True:
        readable, _, _ = select.select([0, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            _reap(children, replies)
        if 0 not in readable:
            continue
        received = os.read(0, 1 << 16)
        *lines, pending = (pending + received).split(b"\n")
        if not received or b"" in lines:
            for child in children:
                kill_processes(child)
            return None
        for line in lines:
            child = os.fork()
            if child == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for descriptor in (wake_read, wake_write, replies):
                    os.close(descriptor)
                task = Task.from_json(line)
                task.enter()
                return task
            children.add(child)
            _reply(replies, pid=child)


def _reap(children: set[int], replies: int) -> None:
    for pid in sorted(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            _reply(replies, pid=pid, status=os.waitstatus_to_exitcode(status))


def _reply(descriptor: int, **fields: int) -> None:
    os.write(descriptor, json.dumps(fields).encode() + b"\n")


def _reseed() -> None:
    """Gives the child the random state of a fresh process, or scripts without a seed would agree.

    torch needs nothing: its generators start from a fixed default and the server never draws.
    """
    random.seed()
    if "numpy" in sys.modules:
        importlib.import_module("numpy").random.seed()


if __name__ == "__main__":
    main(sys.argv[1:])
