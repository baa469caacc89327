"""A fork that is killed, fails or loses power at any call leaves no run, or a whole one."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from pathlib import Path

import pytest

from crashlab.crashes import CrashModel, Renames
from crashlab.disk import Disk
from crashlab.interruptions import FailsFrom, Killed, KilledAt, Passing, RefusesLinks
from crashlab.jobs import Content, Job, full_content, read_all
from crashlab.recording import RUN, Recording, RecordingFileSystem
from crashlab.scenarios import empty_disk
from resumekit.errors import ResumekitError, SaveError
from resumekit.fork import fork_checkpoint
from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import FileSystem
from resumekit.storage.ownership import NoLock
from resumekit.storage.store import Store

FORK = Path("/data/runs/b")
NAME = StepName(2)

Wrap = Callable[[FileSystem], FileSystem]


def links(inner: FileSystem) -> FileSystem:
    return inner


def copies(inner: FileSystem) -> FileSystem:
    return RefusesLinks(inner, repeat(errno.EXDEV))


@pytest.fixture(scope="module")
def source() -> Disk:
    """A disk with a run of two checkpoints."""
    job = Job(Recording.on(empty_disk()))
    job.start()
    for step in (1, 2):
        job.save(step)
    return job.recording.disk


def store_of(recording: Recording, directory: Path) -> Store:
    return Store(directory, file_system=RecordingFileSystem(recording), lock=NoLock())


def fork(recording: Recording, wrap: Wrap) -> None:
    reader = store_of(recording, RUN).open_step(NAME)
    file_system = wrap(RecordingFileSystem(recording))
    fork_checkpoint(reader, FORK, file_system=file_system, lock=NoLock())


def forked(recording: Recording) -> Content | None:
    """The content of the forked run's checkpoint, verified; None where it has none."""
    try:
        names = store_of(recording, FORK).step_names()
    except OSError:
        return None
    assert names in ([], [NAME])
    return read_all(store_of(recording, FORK), NAME) if names else None


def check(disk: Disk, *, is_promised: bool) -> None:
    """No run or a whole one; the source is untouched, and the fork can be made now."""
    recording = Recording.on(disk)
    expected = full_content(NAME, 1)
    found = forked(recording)
    assert found in (None, expected)
    assert found is not None or not is_promised
    assert read_all(store_of(recording, RUN), NAME) == expected
    if found is None:
        fork(recording, links)
        assert forked(recording) == expected
    again = store_of(recording, FORK)
    again.acquire()
    again.open_step(NAME)  # of the same run


@pytest.mark.parametrize("wrap", [links, copies])
def test_a_fork_killed_at_any_call_leaves_no_run_or_a_whole_one(source: Disk, wrap: Wrap) -> None:
    num_calls, is_done = 0, False
    while not is_done:
        recording = Recording.on(source)

        def killed(inner: FileSystem, num_calls: int = num_calls) -> FileSystem:
            return wrap(KilledAt(inner, num_calls))

        try:
            fork(recording, killed)
            is_done = True
        except Killed:
            pass
        check(recording.disk, is_promised=is_done)
        num_calls += 1
    assert num_calls > 20


@pytest.mark.parametrize("wrap", [links, copies])
@pytest.mark.parametrize("for_good", [True, False])
def test_a_fork_that_fails_at_any_call_leaves_no_run_or_a_whole_one(
    source: Disk, wrap: Wrap, for_good: bool
) -> None:
    number, has_failed = 0, True
    while has_failed:
        recording, faults = Recording.on(source), list[FailsFrom]()

        def failing(inner: FileSystem, number: int = number) -> FileSystem:
            faults.append(FailsFrom(inner, number, errno.EIO, for_good=for_good))  # noqa: B023
            return wrap(faults[-1])  # noqa: B023

        with suppress(ResumekitError):
            fork(recording, failing)
        check(recording.disk, is_promised=False)
        has_failed = faults[0].has_failed
        number += 1
    assert number > 20


@pytest.mark.parametrize("renames", Renames)
@pytest.mark.parametrize("wrap", [links, copies])
def test_a_power_cut_leaves_no_run_or_a_whole_one(
    source: Disk, wrap: Wrap, renames: Renames
) -> None:
    recording = Recording.on(source)
    fork(recording, wrap)
    num_calls = len(recording.operations)
    seen: set[str] = set()
    for state in CrashModel(recording, limit=8, renames=renames).states():
        if state.key not in seen:
            seen.add(state.key)
            check_after_power_cut(state.disk, renames, is_promised=len(state.done) == num_calls)
    assert len(seen) > 30


def check_after_power_cut(disk: Disk, renames: Renames, *, is_promised: bool) -> None:
    """Where a rename may survive in part, its remains may be found damaged, and never loaded."""
    if renames is Renames.ATOMIC or is_promised:
        check(disk, is_promised=is_promised)
        return
    with suppress(ResumekitError):
        assert forked(Recording.on(disk)) in (None, full_content(NAME, 1))


class Unsynced(Passing):
    """Skips every sync."""

    def fsync(self, handle: int) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


def test_without_syncs_a_power_cut_breaks_the_fork(source: Disk) -> None:
    recording = Recording.on(source)
    fork(recording, lambda inner: copies(Unsynced(inner)))
    num_calls = len(recording.operations)

    def explore() -> None:
        for state in CrashModel(recording, limit=8).states():
            check(state.disk, is_promised=len(state.done) == num_calls)

    with pytest.raises((AssertionError, ResumekitError)):
        explore()


def test_without_space_for_copies_nothing_is_left(source: Disk) -> None:
    recording = Recording.on(source)

    def full(inner: FileSystem) -> FileSystem:
        return copies(FailsFrom(inner, 12, errno.ENOSPC, for_good=True))

    with pytest.raises(SaveError, match="space"):
        fork(recording, full)
    check(recording.disk, is_promised=False)
