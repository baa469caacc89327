"""What is left of a command when its supervisor was killed, and when it has ended by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from resumekit.launcher.processes import is_running, kill_processes

SUPERVISE = [*(sys.executable, "-m", "resumekit.cli", "run", "--dir", "runs/a", "--")]

# Neither the parent of this child nor its session or environment leads to the command.
CHILD = """
import os, signal, subprocess, sys, time
from pathlib import Path
ignoring = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True)'
child = subprocess.Popen(
    [sys.executable, '-c', ignoring + '; time.sleep(300)'],
    env={}, start_new_session=True, stdout=subprocess.PIPE,
)
child.stdout.readline()
"""
TRAIN = f"""{CHILD}
def leave(number, frame):
    time.sleep(0.5)  # its save
    Path('saved').touch()
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, leave)
Path('draft').write_text(f'{{os.getpid()}} {{child.pid}}')
Path('draft').rename('processes')
time.sleep(300)
"""
END = f"{CHILD}Path('processes').write_text(str(child.pid))"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def processes() -> list[int]:
    return [int(each) for each in Path("processes").read_text().split()]


def wait_until(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def test_a_supervisor_that_is_killed_leaves_no_process_and_the_command_saves_before() -> None:
    supervisor = subprocess.Popen([*SUPERVISE, sys.executable, "-c", TRAIN])
    try:
        wait_until(Path("processes").exists)
        supervisor.kill()
        wait_until(lambda: not any(map(is_running, processes())))
    finally:
        supervisor.kill()
        for pid in processes():
            kill_processes(pid)
    wait_until(lambda: not list(Path("runs").iterdir()))  # last of all
    assert Path("saved").exists()


def test_what_outlives_a_command_that_has_ended_with_status_0_continues() -> None:
    assert subprocess.run([*SUPERVISE, sys.executable, "-c", END], check=False).returncode == 0
    try:
        assert all(map(is_running, processes()))
        assert list(Path("runs").iterdir()) == []
    finally:
        for pid in processes():
            os.kill(pid, signal.SIGKILL)
