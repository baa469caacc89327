"""Every write-side call of a run's life fails or is the last one; what was saved must stay."""

from __future__ import annotations

import errno
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from failpoints import FailpointFileSystem, parse_failpoints

from resumekit.errors import DirectoryError, SaveError
from resumekit.storage.directories import StepName
from resumekit.storage.io import direct, pipeline
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

OpenStore = Callable[..., Store]
Save = Callable[..., StepName]


@pytest.fixture(params=["buffered", "direct"], autouse=True)
def io(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the files are written: straight, or in chunks by direct I/O with a small tail."""
    if request.param == "direct":
        monkeypatch.setattr(pipeline, "CHUNK_BYTES", 8192)
        monkeypatch.setattr(direct, "MIN_DIRECT_BYTES", 4096)
    return str(request.param)


@pytest.fixture
def directory(io: str, tmp_path: Path) -> Iterator[Path]:
    """Where run directories are made: a file system that supports direct I/O, or one in memory."""
    if io == "buffered":
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as name:
        yield Path(name)


@pytest.fixture
def save(io: str, save: Save) -> Save:
    """A save of files that are small, or that have several chunks."""
    return save if io == "buffered" else partial(save, content=bytes(range(250)) * 80)


class Unsynced(LocalFileSystem):
    """Does not wait for the disk: a killed process loses nothing that it has written."""

    def fsync(self, handle: int) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


STEPS = (1, 2, 2, 3)
POLICY = RetentionPolicy(keep_latest=2, keep_best=1)


def _live(store: Store, save: Save, done: Callable[[StepName], object]) -> None:
    """A run's life: a fresh directory, saves with one step twice, retention, a best one."""
    store.acquire()
    for step in STEPS:
        done(save(store, step, metric=step / 10))
        store.retain(POLICY)
        store.empty_trash()


def _live_until_killed(store: Store, save: Save) -> list[StepName]:
    """The saves that returned in a process of their own before it was killed."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _live(store, save, lambda name: os.write(write_end, f"{name}\n".encode()))
        os._exit(0)
    os.close(write_end)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    with open(read_end) as pipe:
        return [StepName.from_text(line.strip()) for line in pipe]


def _num_calls(open_store: OpenStore, save: Save, directory: Path) -> int:
    counting = FailpointFileSystem(Unsynced())
    store = open_store(directory, file_system=counting)
    _live(store, save, lambda name: None)
    return counting.num_write_calls


def _check(store: Store, save: Save, finished: Sequence[StepName]) -> None:
    """A relaunch gets in, every checkpoint that it sees is whole, none has been lost."""
    store.acquire()
    names = store.step_names()
    for name in names:
        store.open_step(name).verify()
    if finished:
        assert names, f"{finished} were saved, and nothing is left"
        assert names[0] >= max(finished)
    assert list((store.directory / ".staging").iterdir()) == []
    newer = save(store, 50)
    store.retain(POLICY)
    store.open_step(newer).verify()
    store.release()


def test_large_files_of_these_lives_are_written_by_direct_io(
    open_store: OpenStore, save: Save, directory: Path, io: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "resumekit"):
        _live(open_store(directory / "run"), save, lambda name: None)
    if "buffered I/O" in caplog.text:
        pytest.skip("no direct I/O here")
    assert ("using direct I/O" in caplog.text) == (io == "direct")


@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.full), 3])
def test_a_kill_at_any_call_leaves_every_finished_save(
    open_store: OpenStore, save: Save, directory: Path, apart: int
) -> None:
    num_calls = _num_calls(open_store, save, directory / "counted" / "run")
    assert num_calls > 80
    for number in range(1, num_calls + 1, apart):
        run = directory / f"{number}" / "run"
        plan = parse_failpoints(f"{number}={'torn' if number % 2 else 'kill'}")
        failing = FailpointFileSystem(Unsynced(), plan)
        finished = _live_until_killed(open_store(run, file_system=failing), save)
        _check(open_store(run), save, finished)


@pytest.mark.parametrize("cause", ["=EIO", "+=ENOSPC"], ids=["once", "for good"])
def test_an_error_at_any_call_is_typed_and_costs_nothing_saved(
    open_store: OpenStore, save: Save, directory: Path, cause: str
) -> None:
    num_calls = _num_calls(open_store, save, directory / "counted" / "run")
    num_raised = 0
    for number in range(1, num_calls + 1):
        run = directory / f"{number}" / "run"
        failing = FailpointFileSystem(Unsynced(), parse_failpoints(f"{number}{cause}"))
        store = open_store(run, file_system=failing)
        finished: list[StepName] = []
        raised: SaveError | DirectoryError | None = None
        try:
            _live(store, save, finished.append)
        except (SaveError, DirectoryError) as error:
            raised = error
        if raised is not None:
            num_raised += 1
            assert raised.errno in (errno.EIO, errno.ENOSPC)
            assert str(directory / f"{number}") in raised.where
            assert errno.errorcode[raised.errno] in str(raised)
        store.release()
        _check(open_store(run), save, finished)
    # What may fail without a word: the advisory `latest`, and sweeping what is left over.
    assert num_raised > 0.75 * num_calls


def test_a_failing_save_leaves_no_staging_and_the_next_one_succeeds(
    open_store: OpenStore, save: Save, directory: Path
) -> None:
    first = FailpointFileSystem(Unsynced())
    store = open_store(directory / "counted", file_system=first)
    store.acquire()
    before = first.num_write_calls
    save(store, 1)
    for number in range(1, first.num_write_calls - before + 1):
        failing = FailpointFileSystem(Unsynced())
        store = open_store(directory / f"{number}", file_system=failing)
        store.acquire()
        save(store, 1)
        failing._plan = parse_failpoints(f"{failing.num_write_calls + number}=EIO")
        try:
            save(store, 2)
        except SaveError:
            assert list((store.directory / ".staging").iterdir()) == [], number
        newest = save(store, 3)
        assert store.step_names()[0] == newest
        assert list((store.directory / ".staging").iterdir()) == []
        for name in store.step_names():
            store.open_step(name).verify()
        store.release()


class _Recording(LocalFileSystem):
    """Notes write-side calls as (call, path)."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, Path]] = []
        self._paths: dict[int, Path] = {}

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.log.append(("mkdir", path))

    def create(self, path: Path) -> int:
        handle = super().create(path)
        self._paths[handle] = path
        self.log.append(("create", path))
        return handle

    def fsync(self, handle: int) -> None:
        super().fsync(handle)
        self.log.append(("fsync", self._paths[handle]))

    def fsync_dir(self, path: Path) -> None:
        super().fsync_dir(path)
        self.log.append(("fsync_dir", path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.log.append(("rename", target))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.log.append(("unlink", path))


def test_all_is_durable_before_the_rename_and_the_rename_before_the_return(
    open_store: OpenStore, save: Save, tmp_path: Path
) -> None:
    recording = _Recording()
    store = open_store(tmp_path / "runs" / "a", file_system=recording)
    store.acquire()
    for parent in store.directory.parents:
        made = [at for at, row in enumerate(recording.log) if row[0] == "mkdir"]
        assert ("fsync_dir", parent) in recording.log[made[1] :]
    recording.log.clear()
    save(store, 1)
    log = recording.log
    renamed = log.index(("rename", store.directory / "step-00000001"))
    created = [path for call, path in log[:renamed] if call == "create"]
    directories = [path for call, path in log[:renamed] if call == "mkdir"]
    assert len(created) == 3
    for path in created:
        assert log.index(("fsync", path)) < renamed
        assert max(at for at, row in enumerate(log) if row == ("fsync_dir", path.parent)) > (
            log.index(("create", path))
        )
    for path in directories:
        assert ("fsync_dir", path) in log[:renamed]
    assert {("fsync_dir", path) for path in (store.directory, store.directory / ".staging")} <= {
        *log[renamed + 1 : renamed + 3]
    }
    assert [row for row in log[renamed:] if row[0] == "fsync"] == []


def test_nothing_is_deleted_before_its_name_is_gone_durably(
    open_store: OpenStore, save: Save, tmp_path: Path
) -> None:
    recording = _Recording()
    store = open_store(tmp_path / "a", file_system=recording)
    store.acquire()
    for step in (1, 2, 3, 4):
        save(store, step)
    recording.log.clear()
    store.retain(RetentionPolicy(keep_latest=1))
    store.empty_trash()
    calls = [call for call, _ in recording.log]
    assert calls[:4] == ["rename", "rename", "rename", "fsync_dir"]
    assert recording.log[3] == ("fsync_dir", store.directory)
    assert set(calls[4:]) == {"unlink"}
