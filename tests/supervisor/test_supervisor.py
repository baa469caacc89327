"""Commands that end, crash, and get signals, under the supervisor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from resumekit.attach import AttachSettings
from resumekit.errors import ConfigurationError
from resumekit.launcher.processes import is_running
from resumekit.supervisor import Supervisor

CRASH = "import sys; open('launches', 'a').write('x'); sys.exit(3)"
WAIT = """
import os, signal, subprocess, sys, time
def leave(number, frame):
    open('signals', 'a').write(f'{number} ')
    sys.exit(128 + number)
for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
    signal.signal(each, leave)
open('ready', 'w').close()
time.sleep(60)
"""


# A launcher that forwards no signal, a rank, and a worker of the rank that imports the same script.
RANK = """
import os, resumekit.checkpointer, signal, subprocess, sys, time
from pathlib import Path
def note(number, frame):
    with open('signals', 'a') as file:
        file.write(f'{sys.argv[1]} {number} ')
    time.sleep(0.5)  # in which a worker that gets the signal notes it
    sys.exit(128 + number)
signal.signal(signal.SIGUSR1, note)
if sys.argv[1] == 'rank':
    worker = subprocess.Popen([sys.executable, __file__, 'worker'])
else:
    Path('ready').touch()
signal.pause()
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def supervised(
    program: str, *, max_restarts: int = 3, lines: list[str] | None = None, **options: Any
) -> int:
    settings = AttachSettings(str(Path("runs/a").absolute()))
    supervisor = Supervisor(
        [sys.executable, "-c", program],
        settings,
        max_restarts=max_restarts,
        on_event=([] if lines is None else lines).append,
        **options,
    )
    return supervisor.run()


def test_the_exit_status_is_that_of_the_command_and_no_file_is_left() -> None:
    assert supervised("pass") == 0
    assert supervised("raise SystemExit(2)") == 2
    assert supervised("import os; os.kill(os.getpid(), 9)", max_restarts=0) == 137
    assert list(Path("runs").iterdir()) == []


def test_a_crash_is_followed_by_a_restart_until_two_came_before_the_first_step() -> None:
    lines: list[str] = []
    slept: list[float] = []
    assert supervised(CRASH, lines=lines, sleep=slept.append) == 3
    assert Path("launches").read_text() == "xx"
    assert sum(slept) == 1
    assert lines == [
        "exit status 3, no checkpoint: restart 1 of 3 in 1 s",
        "exit status 3, no checkpoint: 2 launches ended before the first step",
    ]


def test_processes_that_outlive_a_crash_are_ended_before_the_restart() -> None:
    program = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        "'import time; time.sleep(60)'], start_new_session=True);"
        "open('children', 'a').write(f'{child.pid} '); sys.exit(3)"
    )
    assert supervised(program, sleep=lambda _: None) == 3
    children = [int(each) for each in Path("children").read_text().split()]
    assert len(children) == 2
    assert not any(map(is_running, children))


def test_a_command_that_is_no_program_is_an_error() -> None:
    settings = AttachSettings(str(Path("runs/a").absolute()))
    supervisor = Supervisor(["no-such-program"], settings, max_restarts=0, on_event=lambda _: None)
    with pytest.raises(ConfigurationError, match="cannot be started"):
        supervisor.run()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP"])
def test_a_signal_reaches_the_command_once_and_there_is_no_restart(name: str) -> None:
    command = [sys.executable, "-m", "resumekit.cli", "run", "--dir", "runs/a", "--"]
    process = subprocess.Popen([*command, sys.executable, "-c", WAIT], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not Path("ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    number = getattr(signal, name)
    process.send_signal(number)
    _, output = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert Path("signals").read_text() == f"{int(number)} "
    assert f"{name} was forwarded" in output.decode()


def test_a_signal_reaches_the_process_with_a_checkpointer_and_no_worker_of_it() -> None:
    Path("rank.py").write_text(RANK)
    launch = (
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, 'rank.py', 'rank']))"
    )
    command = [sys.executable, "-m", "resumekit.cli", "run", "--dir", "runs/a", "--"]
    process = subprocess.Popen([*command, sys.executable, "-c", launch])
    deadline = time.monotonic() + 120
    while not Path("ready").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    process.wait(timeout=120)
    assert Path("signals").read_text() == f"rank {int(signal.SIGUSR1)} "


def test_a_signal_while_waiting_for_a_restart_ends_the_run() -> None:
    def sleep(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    assert supervised(CRASH, sleep=sleep) == 128 + signal.SIGUSR1
    assert Path("launches").read_text() == "x"


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import torch", "resumekit.adapters.torch"),
        ("import torch, accelerate", "resumekit.adapters.accelerate"),
        ("import resumekit.checkpointer", ""),
        ("pass", ""),
    ],
)
def test_a_loop_without_a_trainer_is_shown_the_lines_that_it_needs(
    program: str, found: str
) -> None:
    lines: list[str] = []
    assert supervised(program, lines=lines) == 0
    assert len(lines) == bool(found)
    assert all(found in line and "'runs/a'" in line for line in lines)
