from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from failpoints import FailpointFileSystem, parse_failpoints

from resumekit.errors import SaveError
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.io.pipeline import UnsyncedFiles

NUM_FILES = 7


class Meeting(LocalFileSystem):
    """Syncs return only once so many of them are made at the same time; some fail."""

    def __init__(self, num_at_once: int, failing: int | None = None) -> None:
        super().__init__()
        self._meeting = threading.Barrier(num_at_once, timeout=20)
        self._failing = failing
        self._lock = threading.Lock()
        self.num_syncs = 0
        self.num_open = 0

    def create(self, path: Path) -> int:
        self.num_open += 1
        return super().create(path)

    def close(self, handle: object) -> None:
        assert isinstance(handle, int)
        with self._lock:
            self.num_open -= 1
        super().close(handle)

    def fsync(self, handle: int) -> None:
        self._sync()

    def fsync_dir(self, path: Path) -> None:
        self._sync()

    def _sync(self) -> None:
        self._meeting.wait()
        with self._lock:
            self.num_syncs += 1
            number = self.num_syncs
        if number == self._failing:
            raise OSError(5, os.strerror(5))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / str(number) for number in range(NUM_FILES)]


def _unsynced(file_system: Meeting | FailpointFileSystem, paths: list[Path]) -> UnsyncedFiles:
    unsynced = UnsyncedFiles(file_system)
    for path in paths:
        unsynced.add(file_system.create(path), path)
    return unsynced


def test_files_and_directories_are_synced_at_the_same_time(
    tmp_path: Path, paths: list[Path]
) -> None:
    disk = Meeting(NUM_FILES + 1)
    _unsynced(disk, paths).sync([tmp_path])
    assert (disk.num_syncs, disk.num_open) == (NUM_FILES + 1, 0)


def test_one_failure_among_many_is_raised_and_every_file_is_closed(paths: list[Path]) -> None:
    disk = Meeting(1, failing=3)
    unsynced = _unsynced(disk, paths)
    with pytest.raises(SaveError, match="EIO"):
        unsynced.sync()
    assert disk.num_open == 0
    num_syncs = disk.num_syncs
    unsynced.sync()  # a failed sync is not repeated
    assert disk.num_syncs == num_syncs


def test_files_are_closed_and_not_synced_after_an_error(paths: list[Path]) -> None:
    disk = Meeting(1)
    with pytest.raises(KeyError), _unsynced(disk, paths):
        raise KeyError
    assert (disk.num_syncs, disk.num_open) == (0, 0)


def test_another_file_system_is_called_in_order_and_names_what_failed(paths: list[Path]) -> None:
    failing = FailpointFileSystem(LocalFileSystem(), parse_failpoints("fsync:3=EIO"))
    with pytest.raises(SaveError, match=r"/2: could not be written: EIO"):
        _unsynced(failing, paths).sync()
    assert (failing.counts["fsync"], failing.counts["close"]) == (3, NUM_FILES)


LAST_SAVE = """
import sys
from resumekit.storage.io import pipeline

pipeline.make_at_once([lambda: None] * 3)
with pipeline.Calls() as calls:
    calls.submit(lambda: None)


class Last:
    def __init__(self):
        self.made, self.make, self.calls, self.sys = [], pipeline.make_at_once, pipeline.Calls, sys

    def __del__(self):
        assert self.sys.is_finalizing()
        self.make([lambda: self.made.append(1)] * 3)
        with self.calls() as calls:
            calls.submit(lambda: self.made.append(1))
            calls.wait()
        print(len(self.made), "made")


sys.modules["last"] = Last()  # until the modules go
"""


def test_at_the_end_of_the_interpreter_no_thread_is_waited_for() -> None:
    command = [sys.executable, "-c", LAST_SAVE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("4 made\n", "")
