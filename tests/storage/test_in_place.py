"""Saves and deletions under the final name, where a rename is not atomic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from crashlab.interruptions import CopiesOnRename, LowerLayer
from resumekit.errors import CorruptCheckpointError, OwnershipLostError, SaveError
from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.ownership import NoLock
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

OpenStore = Callable[..., Store]
Save = Callable[..., StepName]


@pytest.fixture
def store(open_store: OpenStore) -> Store:
    store = open_store(file_system=CopiesOnRename(LocalFileSystem()))
    store.acquire()
    return store


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("step-"))


def test_every_file_system_reads_a_checkpoint_that_was_written_in_place(
    store: Store, save: Save, run_directory: Path
) -> None:
    name = save(store, 5)
    Store(run_directory).open_step(name).verify()
    assert _names(run_directory) == ["step-00000005"]


def test_a_checkpoint_without_its_manifest_does_not_count_and_is_removed_by_the_next_launch(
    store: Store, save: Save, run_directory: Path, open_store: OpenStore
) -> None:
    save(store, 5)
    staging = store.stage(StepName(6), num_bytes=1, num_files=1, directories=["state"])
    with staging.create("state/a", writer=0) as writer:
        writer.write([memoryview(b"a")])
        writer.finish()
    assert _names(run_directory) == ["step-00000005", "step-00000006", "step-00000006.incomplete"]
    assert store.step_names() == Store(run_directory).step_names() == [StepName(5)]
    store.release()
    again = open_store(run_directory)  # where a rename is atomic
    again.acquire()
    assert _names(run_directory) == ["step-00000005"]
    assert again.quarantined() == []


def test_without_its_mark_a_missing_manifest_is_damage(
    store: Store, save: Save, run_directory: Path
) -> None:
    name = save(store, 5)
    (run_directory / str(name) / "manifest.json").unlink()
    assert store.step_names() == [name]
    with pytest.raises(CorruptCheckpointError, match="is missing"):
        store.open_step(name)


def test_a_mark_that_was_left_next_to_a_whole_checkpoint_does_not_matter(
    store: Store, save: Save, run_directory: Path, open_store: OpenStore
) -> None:
    name = save(store, 5)
    (run_directory / f"{name}.incomplete").touch()
    store.release()
    again = open_store(run_directory, file_system=CopiesOnRename(LocalFileSystem()))
    again.acquire()
    assert again.step_names() == [name]
    save(again, 6, policy=RetentionPolicy(keep_latest=1))
    assert _names(run_directory) == ["step-00000006"]


def test_a_deletion_takes_the_manifest_first(store: Store, save: Save, run_directory: Path) -> None:
    save(store, 5)
    save(store, 6)
    assert store.retain(RetentionPolicy(keep_latest=1)) == [StepName(5)]
    assert store.step_names() == [StepName(6)]
    assert "step-00000005.incomplete" in _names(run_directory)
    assert not (run_directory / "step-00000005" / "manifest.json").exists()
    store.empty_trash()
    assert _names(run_directory) == ["step-00000006"]


def test_a_save_that_fails_leaves_nothing(store: Store, save: Save, run_directory: Path) -> None:
    save(store, 5)
    staging = store.stage(StepName(6), num_bytes=1, num_files=1, directories=["state"])
    store.abandon(staging)
    assert _names(run_directory) == ["step-00000005"]


def test_another_rank_attaches_to_the_directory(store: Store, run_directory: Path) -> None:
    staging = store.stage(StepName(6), num_bytes=1, num_files=1, directories=["state"])
    other = store.attach(staging.name)
    assert other.path == staging.path == run_directory / "step-00000006"


def test_without_a_lock_the_later_of_two_jobs_owns_the_directory(
    run_directory: Path, save: Save
) -> None:
    first, second = (Store(run_directory, lock=NoLock()) for _ in range(2))
    first.acquire()
    save(first, 1)
    second.acquire()
    with pytest.raises((OwnershipLostError, SaveError), match="names process"):
        save(first, 2)
    assert save(second, 2) == StepName(2)
    assert second.step_names() == [StepName(2), StepName(1)]


@pytest.fixture
def on_overlay(open_store: OpenStore) -> Store:
    store = open_store(file_system=LowerLayer(LocalFileSystem()))
    store.acquire()
    return store


def test_a_checkpoint_in_the_lower_layer_of_an_overlay_is_deleted_in_place(
    on_overlay: Store, save: Save, run_directory: Path
) -> None:
    save(on_overlay, 5)
    save(on_overlay, 6)
    assert on_overlay.retain(RetentionPolicy(keep_latest=1)) == [StepName(5)]
    assert on_overlay.step_names() == [StepName(6)]
    assert "step-00000005.incomplete" in _names(run_directory)
    on_overlay.empty_trash()
    assert _names(run_directory) == ["step-00000006"]


def test_a_damaged_one_is_moved_into_quarantine_file_by_file(
    on_overlay: Store, save: Save, run_directory: Path
) -> None:
    name = save(on_overlay, 5)
    path = run_directory / str(name)
    before = {str(file.relative_to(path)) for file in path.rglob("*")}
    target = on_overlay.quarantine(name, CorruptCheckpointError(str(name), found="damage"))
    assert {str(file.relative_to(target)) for file in target.rglob("*")} == before
    assert on_overlay.quarantined() == [target.name]
    assert _names(run_directory) == []
