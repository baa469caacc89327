"""Ends a command whose supervisor was killed: a process that waits for that.

It reads from a pipe of which only the supervisor has the other end, so it reads the end of the file
however the supervisor ends. It needs no privilege and no support by the container.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from resumekit.launcher import marker_of
from resumekit.launcher.processes import Launch, handled_signals, kill_processes
from resumekit.supervisor.commands import FORWARDED, forward_signal

# Together with what the kernel and a scan of the processes take: below 10 seconds.
_GRACE_SECONDS = 8.0


@contextmanager
def watched(command: Sequence[str], private: Path) -> Iterator[Callable[[int | None], None]]:
    """Removes the launcher's directory at the end; if this process is killed, ends the command too.

    The training processes get a SIGTERM, and 8 seconds later all that is left a SIGKILL.

    Args:
        command: program and arguments.
        private: the launcher's directory, an absolute path.

    Yields:
        A function that takes the id of the process of each launch, and None after its end.
    """
    words = [sys.executable, "-c", f"from {__name__} import watch; watch()", str(private), *command]
    with Launch(words, os.environ, stdin=subprocess.PIPE, bufsize=0) as process:

        def follow(root: int | None) -> None:
            assert process.stdin is not None, "a pipe was asked for"
            with suppress(BrokenPipeError):  # the watcher was killed
                process.stdin.write(b"%d\n" % (root or 0))

        try:
            yield follow
        finally:
            shutil.rmtree(private, ignore_errors=True)
            process.kill()


def watch() -> None:
    """Waits for the end of the process that has started this one, and ends its command."""
    private, command = Path(sys.argv[1]), sys.argv[2:]
    # What a scheduler sends to all processes of a job is for the supervisor.
    with handled_signals(signal.SIG_IGN, *FORWARDED):
        lines = sys.stdin.read().split()
        # Without a line the supervisor may have been killed between a start and its message.
        root = int(lines[-1]) or None if lines else None
        if root is not None:
            forward_signal(signal.SIGTERM, command, private, root)
        kill_processes(root, marker_of(private), grace_seconds=_GRACE_SECONDS)
        shutil.rmtree(private, ignore_errors=True)
