"""A forked task ends as an interpreter does, whatever way it ends."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from resumekit.testing import Cell, KillPoint, Kit
from resumekit.testing.launchers import ForkServer

END = f"{Path(__file__).parent / 'scripts' / 'endings.py'}:end"


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    with Kit(tmp_path_factory.mktemp("kit"), preload=("json",)) as kit:
        yield kit


@pytest.mark.parametrize(
    ("how", "message"), [("returns", ""), ("raises", "RuntimeError: on purpose"), ("exits", "line")]
)
def test_handlers_run_threads_are_waited_for_and_output_is_there(
    kit: Kit, how: str, message: str
) -> None:
    run = kit.run_again(kit.new_run(Cell(END, {"how": how})))
    marks = {path.name for path in (run.directory / "training").iterdir()}
    assert marks == {"exit handler", "thread"}
    (log,) = run.directory.glob("*.log")
    assert log.read_text().startswith("not a whole line")
    assert bool(run.failure) == bool(message)
    assert message in run.failure


def test_the_status_is_the_tasks_own(kit: Kit) -> None:
    # The kit takes 128 + 15 for what was asked of it, and any other status for a failure.
    asked = KillPoint.nowhere("SIGTERM")
    run = kit.run_again(kit.new_run(Cell(END, {"how": "exits"})), kill=asked)
    assert run.failure
    assert not run.launches[0].was_killed


def test_it_ends_while_another_process_has_its_pipe_too() -> None:
    server = ForkServer(("json",), os.environ)
    # Like a worker of a DataLoader, which outlives the test that started it.
    with subprocess.Popen(["sleep", "300"], pass_fds=[server._requests.fileno()]) as other:
        began = time.monotonic()
        server.close()
        seconds = time.monotonic() - began
        other.kill()
    assert seconds < 60


def test_cold_launches_of_two_threads_do_not_take_each_others_ends(tmp_path: Path) -> None:
    with Kit(tmp_path, cold=True) as kit, ThreadPoolExecutor(2) as pool:
        cells = [Cell(END, {"how": how}) for how in ("returns", "raises")]
        runs = [kit.new_run(cell) for cell in cells * 2]
        failures = [run.failure for run in pool.map(kit.run_again, runs)]
    assert [bool(failure) for failure in failures] == [False, True] * 2
