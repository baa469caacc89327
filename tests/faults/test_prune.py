"""``prune`` that is killed, fails or loses power at any call: each checkpoint is whole or gone."""

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
from crashlab.jobs import Job, full_content, read_all
from crashlab.recording import RUN, Recording, RecordingFileSystem
from crashlab.scenarios import KEEP_ALL, empty_disk
from resumekit.errors import ResumekitError
from resumekit.prune import prune_run
from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import FileSystem
from resumekit.storage.manifest import is_pruned
from resumekit.storage.ownership import NoLock
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

Wrap = Callable[[FileSystem], FileSystem]

# Of the steps 1 to 4 with the best metric at step 1, and with the weights alone before step 4.
PRUNED = [StepName(4), StepName(3, 1), StepName(1)]


def links(inner: FileSystem) -> FileSystem:
    return inner


def copies(inner: FileSystem) -> FileSystem:
    return RefusesLinks(inner, repeat(errno.EXDEV))


@pytest.fixture(scope="module")
def source() -> Disk:
    job = Job(Recording.on(empty_disk()), policy=KEEP_ALL)
    job.start()
    for step in (1, 2, 3, 4):
        job.save(step, metric=float(step))
    return job.recording.disk


def prune(recording: Recording, wrap: Wrap) -> None:
    store = Store(RUN, file_system=wrap(RecordingFileSystem(recording)), lock=NoLock())
    store.acquire()
    policy = RetentionPolicy(keep_latest=2, keep_best=1)
    prune_run(store, policy, reduces=lambda manifest: manifest.step < 4)


def check(disk: Disk, *, is_done: bool, is_repeated: bool = True) -> None:
    """Every checkpoint is whole, none that stays is missing, and the next call does the rest."""
    recording = Recording.on(disk)
    store = Store(RUN, file_system=RecordingFileSystem(recording), lock=NoLock())
    names = store.step_names()
    assert {StepName(4), StepName(1)} <= set(names)
    assert {StepName(3), StepName(3, 1)} & set(names)
    for name in names:
        whole = full_content(StepName(name.step), 1)
        weights = {path: data for path, data in whole.items() if path.startswith("model/")}
        assert read_all(store, name) == (weights if name.revision else whole)
        assert is_pruned(store.open_step(name).manifest) == bool(name.revision)
    assert names == PRUNED or not is_done
    if is_repeated:
        prune(recording, links)
        check(recording.disk, is_done=True, is_repeated=False)


@pytest.mark.parametrize("wrap", [links, copies])
def test_killed_at_any_call_every_checkpoint_is_whole(source: Disk, wrap: Wrap) -> None:
    num_calls, is_done = 0, False
    while not is_done:
        recording = Recording.on(source)

        def killed(inner: FileSystem, num_calls: int = num_calls) -> FileSystem:
            return wrap(KilledAt(inner, num_calls))

        try:
            prune(recording, killed)
            is_done = True
        except Killed:
            pass
        check(recording.disk, is_done=is_done)
        num_calls += 1
    assert num_calls > 20


@pytest.mark.parametrize("for_good", [True, False])
def test_failing_at_any_call_every_checkpoint_is_whole(source: Disk, for_good: bool) -> None:
    number, has_failed = 0, True
    while has_failed:
        recording, faults = Recording.on(source), list[FailsFrom]()

        def failing(inner: FileSystem, number: int = number) -> FileSystem:
            faults.append(FailsFrom(inner, number, errno.EIO, for_good=for_good))  # noqa: B023
            return faults[-1]  # noqa: B023

        with suppress(ResumekitError):
            prune(recording, failing)
        check(recording.disk, is_done=False)
        has_failed = faults[0].has_failed
        number += 1
    assert number > 20


@pytest.mark.parametrize("wrap", [links, copies])
def test_after_a_power_cut_every_checkpoint_is_whole(source: Disk, wrap: Wrap) -> None:
    recording = Recording.on(source)
    prune(recording, wrap)
    seen: set[str] = set()
    for state in CrashModel(recording, limit=8, renames=Renames.ATOMIC).states():
        if state.key not in seen:
            seen.add(state.key)
            check(state.disk, is_done=len(state.done) == len(recording.operations))
    assert len(seen) > 30


class Unsynced(Passing):
    """Skips every sync."""

    def fsync(self, handle: int) -> None:
        pass

    def fsync_dir(self, path: Path) -> None:
        pass


def test_without_syncs_a_power_cut_loses_weights(source: Disk) -> None:
    """Negative control."""
    recording = Recording.on(source)
    prune(recording, lambda inner: copies(Unsynced(inner)))

    def explore() -> None:
        for state in CrashModel(recording, limit=8).states():
            check(state.disk, is_done=False)

    with pytest.raises((AssertionError, ResumekitError)):
        explore()
