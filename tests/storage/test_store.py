from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from failpoints import FailpointFileSystem, parse_failpoints

from resumekit.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    CorruptCheckpointError,
    DirectoryError,
    ForeignCheckpointError,
    FormatVersionError,
    InsufficientSpaceError,
    LoopError,
    OwnershipLostError,
    SaveError,
    SharedDirectoryError,
    UnreadableCheckpointError,
    UnsupportedValueError,
)
from resumekit.storage.directories import StepName, seal
from resumekit.storage.files import FileEntry
from resumekit.storage.io.file_system import Entry, Free, LocalFileSystem, ReadHandle
from resumekit.storage.manifest import Manifest
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

OpenStore = Callable[..., Store]
Save = Callable[..., StepName]
MakeManifest = Callable[..., Manifest]

MODEL = "model/rank-00000.safetensors"
STATE = "state/rank-00000.json"


def _names(store: Store) -> list[str]:
    return [str(name) for name in store.step_names()]


def test_what_was_saved_is_read_back(store: Store, save: Save) -> None:
    name = save(store, 5)
    reader = store.open_step(name)
    reader.verify()
    assert reader.manifest.step == 5
    with reader.file(STATE) as file:
        assert file.read() == b"state/rank-00000.json of step-00000005"


def test_a_step_directory_holds_its_files_and_nothing_else(
    store: Store, save: Save, run_directory: Path
) -> None:
    save(store, 5)
    found = {str(path.relative_to(run_directory)) for path in run_directory.rglob("*")}
    assert found == {
        ".lock", ".staging", "latest", "owner.json", "step-00000005", "step-00000005/manifest.json",
        "step-00000005/model", f"step-00000005/{MODEL}", "step-00000005/state",
        f"step-00000005/{STATE}",
    }  # fmt: skip
    assert (run_directory / "latest").read_text() == "step-00000005\n"


def test_directories_that_no_file_needed_are_left_out(
    store: Store, make_manifest: MakeManifest
) -> None:
    staging = store.stage(
        StepName(5), num_bytes=1, num_files=1, directories=["native/deep/er", "state", "optimizer"]
    )
    with staging.create("native/deep/a", writer=0) as writer:
        entry = writer.finish()
    path = store.commit(
        staging,
        make_manifest(run_id=store.run_id, attempt=store.attempt, name=StepName(5), files=[entry]),
    )
    assert sorted(str(item.relative_to(path)) for item in path.rglob("*")) == [
        "manifest.json", "native", "native/deep", "native/deep/a",
    ]  # fmt: skip
    store.open_step(StepName(5)).verify()


def test_names_are_listed_newest_first_and_foreign_ones_are_ignored(
    store: Store, save: Save, run_directory: Path
) -> None:
    for step in (900, 5, 100_000_000, 5):
        save(store, step)
    (run_directory / "notes").mkdir()
    (run_directory / "step-7").mkdir()
    (run_directory / "checkpoint-99999").mkdir()
    assert _names(store) == [
        "step-100000000", "step-00000900", "step-00000005-r1", "step-00000005",
    ]  # fmt: skip


def test_a_step_that_is_saved_again_gets_the_next_revision(store: Store, save: Save) -> None:
    assert [str(save(store, 5)) for _ in range(3)] == [
        "step-00000005", "step-00000005-r1", "step-00000005-r2",
    ]  # fmt: skip
    store.retain(RetentionPolicy())
    assert _names(store) == ["step-00000005-r2"]
    assert store.next_name(5) == StepName(5, 3)


def test_a_checkpoint_that_is_not_there_is_distinguished_from_damage(store: Store) -> None:
    with pytest.raises(CheckpointNotFoundError, match="step-00000005: there is no such"):
        store.open_step(StepName(5))


def test_a_directory_that_is_not_there_is_reported(open_store: OpenStore, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="ENOENT"):
        open_store(tmp_path / "nowhere").step_names()


def _link(path: Path) -> None:
    """Puts a link to an equal file or directory instead of the path."""
    copy = Path(tempfile.mkdtemp(dir=path.parents[len(path.parts) - path.parts.index("runs") - 1]))
    shutil.move(path, copy / "copy")
    path.symlink_to(copy / "copy")


def _swap_for_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _swap_for_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _swap_for_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("path", "damage", "message"),
    [
        (MODEL, Path.unlink, f"{MODEL}: is missing"),
        ("state", shutil.rmtree, "state: is missing"),
        ("manifest.json", Path.unlink, "manifest.json: is missing"),
        (MODEL, lambda path: os.truncate(path, 3), f"{MODEL}: has 3 bytes, expected"),
        (MODEL, lambda path: os.truncate(path, 0), f"{MODEL}: has 0 bytes, expected"),
        (MODEL, _link, f"{MODEL}: is a link or special file, expected a file"),
        ("model", _link, "model: is a link or special file, expected a directory"),
        ("manifest.json", _link, "manifest.json: is missing or not a regular file"),
        (".", _link, "step-00000005: is not a directory"),
        (MODEL, _swap_for_pipe, f"{MODEL}: is a link or special file"),
        (MODEL, _swap_for_directory, f"{MODEL}: is a directory, expected a file"),
        ("state", _swap_for_file, "state: is a file, expected a directory"),
        (".", _swap_for_file, "step-00000005: is not a directory"),
        ("manifest.json", lambda path: os.truncate(path, 0), "without the line that seals"),
        ("manifest.json", lambda path: os.truncate(path, 100), "without the line that seals"),
        (
            ".",
            lambda path: path.rename(path.with_name("step-00000007")),
            "manifest of step-0000000",
        ),
    ],
)
def test_a_damaged_step_directory_is_refused_with_the_reason(
    store: Store,
    save: Save,
    run_directory: Path,
    path: str,
    damage: Callable[[Path], object],
    message: str,
) -> None:
    save(store, 5)
    damage(run_directory / "step-00000005" / path)
    (name,) = store.step_names()
    with pytest.raises(CorruptCheckpointError, match=message):
        store.open_step(name)


def _link_to_nothing(path: Path) -> None:
    path.symlink_to("/nonexistent")


def _make_directory_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "inner").touch()


@pytest.mark.parametrize("make", [Path.touch, _make_directory_with_a_file, _link_to_nothing])
@pytest.mark.parametrize("path", [".DS_Store", "model/.nfs0001"])
def test_files_that_the_manifest_does_not_list_are_ignored_and_reported_once(
    store: Store,
    save: Save,
    run_directory: Path,
    path: str,
    make: Callable[[Path], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for step in (5, 6):
        save(store, step)
        make(run_directory / f"step-0000000{step}" / path)
    for name in store.step_names():
        store.open_step(name).verify()
        store.open_step(name).verify()
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert message.endswith(f"step-00000006: files that are not in its manifest: {path} [RK-832]")
    with pytest.raises(CorruptCheckpointError, match="is not listed in the manifest"):
        store.open_step(StepName(5)).file(path)


def test_retention_deletes_a_checkpoint_with_the_unlisted_files_in_it(
    store: Store, save: Save, run_directory: Path
) -> None:
    outside = run_directory.parent / "outside"
    outside.write_text("kept")
    for step in (5, 6):
        save(store, step)
    _make_directory_with_a_file(run_directory / "step-00000005" / ".snapshot")
    (run_directory / "step-00000005" / "model" / "link").symlink_to(outside)
    assert store.retain(RetentionPolicy(keep_latest=1)) == [StepName(5)]
    store.empty_trash()
    assert list((run_directory / ".staging").iterdir()) == []
    assert outside.read_text() == "kept"


def test_a_directory_in_quarantine_that_is_no_checkpoint_is_not_counted(
    store: Store, save: Save, run_directory: Path
) -> None:
    (run_directory / "quarantine" / ".snapshot").mkdir(parents=True)
    assert store.quarantined() == []
    store.quarantine(save(store, 5), CorruptCheckpointError("x", found="y"))
    assert len(store.quarantined()) == 1


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_not_damaged(
    open_store: OpenStore, store: Store, save: Save, run_directory: Path
) -> None:
    class Deleting(LocalFileSystem):
        """Deletes the checkpoint at a call, as the run that owns the directory may."""

        def __init__(self, call: int) -> None:
            super().__init__()
            self.left = call

        def _reach(self) -> None:
            self.left -= 1
            if self.left == 0:
                (run_directory / "step-00000005").rename(run_directory / ".staging" / "trash")
                shutil.rmtree(run_directory / ".staging" / "trash" / "model")

        def list(self, path: Path) -> list[Entry]:
            self._reach()
            entries = super().list(path)
            self._reach()
            # A listing is no snapshot: what is removed meanwhile is missing from it.
            return entries if self.left > 0 else entries[1:]

        def open(self, path: Path) -> ReadHandle:
            self._reach()
            return super().open(path)

    for call in range(1, 100):
        save(store, 5)
        reading = Deleting(call)
        with suppress(CheckpointNotFoundError):
            open_store(file_system=reading).open_step(StepName(5)).verify()
        if reading.left > 0:
            break  # it has read everything
        shutil.rmtree(run_directory / ".staging" / "trash")
    assert call > 8


def test_a_flipped_byte_in_any_file_is_named_with_both_digests(
    store: Store, save: Save, run_directory: Path
) -> None:
    save(store, 5)
    path = run_directory / "step-00000005" / STATE
    content = bytearray(path.read_bytes())
    content[3] ^= 4
    path.write_bytes(content)
    reader = store.open_step(StepName(5))
    for read in (reader.verify, reader.file(STATE).read):
        with pytest.raises(
            CorruptCheckpointError,
            match=r"step-00000005/state/rank-00000.json: its digest is \w{32}, expected \w{32}",
        ):
            read()


def test_a_file_swapped_with_another_steps_is_found(
    store: Store, save: Save, run_directory: Path
) -> None:
    save(store, 5)
    save(store, 6)
    shutil.copy(run_directory / "step-00000005" / STATE, run_directory / "step-00000006" / STATE)
    with pytest.raises(CorruptCheckpointError, match="digest"):
        store.open_step(StepName(6)).verify()
    manifest = run_directory / "step-00000005" / "manifest.json"
    shutil.copy(manifest, run_directory / "step-00000006" / "manifest.json")
    with pytest.raises(CorruptCheckpointError, match="is the manifest of step-00000005"):
        store.open_step(StepName(6))


def test_the_checkpoints_of_something_else_are_refused_and_left_alone(
    open_store: OpenStore, tmp_path: Path
) -> None:
    where = tmp_path / "other"
    (where / "global_step10").mkdir(parents=True)
    (where / "latest").write_text("global_step10")
    with pytest.raises(DirectoryError, match=r"something else \(global_step10, latest\)"):
        open_store(where).acquire()
    assert sorted(path.name for path in where.iterdir()) == ["global_step10", "latest"]


def test_what_lies_in_a_directory_that_no_run_has_used_is_known(
    open_store: OpenStore, tmp_path: Path
) -> None:
    where = tmp_path / "used"
    for name in ("a", "b", "c", "d", "e"):
        (where / name).mkdir(parents=True)
    store = open_store(where)
    store.acquire()
    assert store.unrelated_names == "a, b, c and 2 more"
    store.release()
    store.acquire()
    assert store.unrelated_names == ""


def test_the_checkpoint_of_another_run_is_refused_with_both_ids(
    open_store: OpenStore, store: Store, save: Save, tmp_path: Path, run_directory: Path
) -> None:
    other = open_store(tmp_path / "other")
    other.acquire()
    save(other, 5)
    shutil.copytree(tmp_path / "other" / "step-00000005", run_directory / "step-00000005")
    message = f"belongs to the run {other.run_id}, expected this directory's run {store.run_id}"
    with pytest.raises(ForeignCheckpointError, match=message):
        store.open_step(StepName(5))
    open_store().open_step(StepName(5)).verify()  # who only looks has no run


def test_a_newer_format_is_reported_and_may_not_be_quarantined(
    store: Store, save: Save, run_directory: Path
) -> None:
    save(store, 5)
    newer = seal({"format": "resumekit checkpoint", "format_version": 9})
    (run_directory / "step-00000005" / "manifest.json").write_bytes(newer)
    with pytest.raises(FormatVersionError) as caught:
        store.open_step(StepName(5))
    with pytest.raises(ConfigurationError, match="expected proven damage"):
        store.quarantine(StepName(5), caught.value)  # type: ignore[arg-type]
    assert _names(store) == ["step-00000005"]


@pytest.mark.parametrize("call", ["list", "open", "read_into"])
def test_an_error_while_looking_proves_no_damage(
    store: Store, save: Save, open_store: OpenStore, call: str
) -> None:
    save(store, 5)
    for number in (1, 2, 3):
        plan = parse_failpoints(f"{call}:{number}=EIO")
        failing = FailpointFileSystem(LocalFileSystem(), plan)
        with pytest.raises(UnreadableCheckpointError, match="EIO"):
            open_store(file_system=failing).open_step(StepName(5)).verify()


def test_a_file_that_the_manifest_does_not_list_is_not_opened(store: Store, save: Save) -> None:
    reader = store.open_step(save(store, 5))
    for path in ("manifest.json", "../owner.json", "/etc/passwd", "state/rank-00001.json"):
        with pytest.raises(CorruptCheckpointError, match="is not listed"):
            reader.file(path)


def test_a_damaged_checkpoint_is_put_aside_with_the_reason(
    store: Store, save: Save, run_directory: Path
) -> None:
    for _ in range(2):  # the same name twice
        save(store, 5)
        (run_directory / "step-00000005" / MODEL).unlink()
        with pytest.raises(CorruptCheckpointError) as caught:
            store.open_step(StepName(5))
        moved_to = store.quarantine(StepName(5), caught.value)
        assert (moved_to / STATE).exists()
        reason = json.loads(moved_to.with_name(f"{moved_to.name}.reason.json").read_text())
        assert reason["checkpoint"] == "step-00000005"
        assert "is missing" in reason["error"]
        assert _names(store) == []
    assert len(store.quarantined()) == 2
    assert all(name.startswith("step-00000005-") for name in store.quarantined())


def test_an_empty_quarantine_holds_nothing(store: Store) -> None:
    assert store.quarantined() == []


def test_what_cannot_be_put_aside_stays(
    store: Store, save: Save, open_store: OpenStore, run_directory: Path, tmp_path: Path
) -> None:
    save(store, 5)
    store.release()
    error = CorruptCheckpointError("x", found="broken")
    failing = FailpointFileSystem(LocalFileSystem(), parse_failpoints("rename:2=EROFS"))
    second = open_store(file_system=failing)
    second.acquire()
    with pytest.raises(DirectoryError, match=r"put step-00000005 into quarantine.*EROFS"):
        second.quarantine(StepName(5), error)
    assert _names(second) == ["step-00000005"]
    shutil.rmtree(run_directory / "quarantine")
    (run_directory / "quarantine").symlink_to(tmp_path)
    with pytest.raises(DirectoryError, match="EEXIST"):
        second.quarantine(StepName(5), error)
    assert _names(second) == ["step-00000005"]


class _Full(LocalFileSystem):
    room = Free(10**12, 10**6)

    def free(self, path: Path) -> Free:
        return self.room


@pytest.mark.parametrize(
    ("room", "message"),
    [
        (Free(100_000, 10**6), "100,000 bytes are free, expected"),
        (Free(10**12, 5), "5 more files can be made, expected 7"),
    ],
)
def test_a_save_without_room_is_refused_before_anything_is_written(
    open_store: OpenStore, room: Free, message: str, run_directory: Path
) -> None:
    full = _Full()
    counting = FailpointFileSystem(full)
    store = open_store(file_system=counting)
    store.acquire()
    full.room = room
    before = counting.num_write_calls
    with pytest.raises(InsufficientSpaceError, match=message):
        store.stage(StepName(5), num_bytes=90_000, num_files=3, directories=["state"])
    assert counting.num_write_calls == before
    full.room = Free(10**12, None)
    store.stage(StepName(5), num_bytes=90_000, num_files=3, directories=["state"])


def test_ranks_write_into_one_staging_directory(
    store: Store, open_store: OpenStore, make_manifest: MakeManifest
) -> None:
    staging = store.stage(StepName(5), num_bytes=10, num_files=2, directories=["state"])
    other = open_store()
    other.join(store.run_id, store.attempt)
    attached = other.attach(staging.name)
    assert (attached.path, attached.step) == (staging.path, staging.step)
    files = []
    for rank, each in enumerate((staging, attached)):
        with each.create(f"state/rank-0000{rank}.json", writer=rank) as writer:
            writer.write([memoryview(b"%d" % rank)])
            files.append(writer.finish())
    store.commit(
        staging,
        make_manifest(
            run_id=store.run_id,
            attempt=store.attempt,
            name=StepName(5),
            files=files,
            world_size=2,
        ),
    )
    other.open_step(StepName(5)).verify()


def test_a_rank_that_does_not_see_the_staging_directory_is_reported(
    store: Store, open_store: OpenStore, tmp_path: Path
) -> None:
    staging = store.stage(StepName(5), num_bytes=10, num_files=2, directories=["state"])
    with pytest.raises(SharedDirectoryError, match="this rank does not see"):
        open_store(tmp_path / "elsewhere").attach(staging.name)
    for name in ("../../x", "/etc", "", "step-5", staging.name + "/state"):
        with pytest.raises(ConfigurationError, match="not the name"):
            store.attach(name)


@pytest.mark.parametrize("path", ["../x", "/x", "manifest.json", "state/../x", "state//x"])
def test_no_file_is_made_outside_staging(store: Store, path: str) -> None:
    staging = store.stage(StepName(5), num_bytes=10, num_files=2, directories=["state"])
    with pytest.raises(ConfigurationError):
        staging.create(path, writer=0)
    with pytest.raises(ConfigurationError):
        store.stage(StepName(5), num_bytes=10, num_files=2, directories=[path])


def test_a_commit_refuses_what_its_manifest_does_not_describe(
    store: Store, make_manifest: MakeManifest, run_directory: Path
) -> None:
    def commit(**changes: object) -> None:
        staging = store.stage(StepName(5), num_bytes=10, num_files=2, directories=["state"])
        with staging.create("state/a", writer=0) as writer:
            writer.write([memoryview(b"12345")])
            entry = writer.finish()
        fields = {"name": StepName(5), "run_id": store.run_id, "attempt": store.attempt}
        store.commit(staging, make_manifest(**{**fields, "files": [entry], **changes}))

    wrong_size = FileEntry("state/a", 4, "0" * 32, 0)
    for error, changes in (
        (SaveError, {"files": []}),
        (SaveError, {"files": [wrong_size]}),
        (SaveError, {"files": [FileEntry("state/b", 5, "0" * 32, 0)]}),
        (ConfigurationError, {"name": StepName(6)}),
        (ConfigurationError, {"run_id": "0" * 32}),
        (ConfigurationError, {"attempt": "0" * 32}),
        (UnsupportedValueError, {"details": {"x": object()}}),
    ):
        with pytest.raises(error):
            commit(**changes)
        assert list((run_directory / ".staging").iterdir()) == []
        assert _names(store) == []
    commit()


def test_a_committed_directory_is_never_replaced(
    store: Store, save: Save, run_directory: Path, make_manifest: MakeManifest
) -> None:
    staging = store.stage(StepName(5), num_bytes=10, num_files=2, directories=[])
    (run_directory / "step-00000005").mkdir()
    manifest = make_manifest(run_id=store.run_id, attempt=store.attempt, name=StepName(5))
    with pytest.raises(SaveError, match="step-00000005: is there already"):
        store.commit(staging, manifest)
    assert list((run_directory / "step-00000005").iterdir()) == []


def test_retention_waits_for_a_commit(store: Store, save: Save, open_store: OpenStore) -> None:
    for step in (1, 2, 3):
        save(store, step)
    store.release()
    second = open_store()
    second.acquire()
    assert second.retain(RetentionPolicy(keep_latest=1)) == []
    save(second, 4)
    assert second.retain(RetentionPolicy(keep_latest=1)) == [StepName(1), StepName(2), StepName(3)]
    assert _names(second) == ["step-00000004"]


def test_retention_opens_no_checkpoint_while_it_deletes_none_and_each_once_later(
    store: Store, save: Save, open_store: OpenStore
) -> None:
    policy = RetentionPolicy(keep_latest=6)
    for step in range(4):
        save(store, step)
    store.release()
    counting = FailpointFileSystem(LocalFileSystem())
    second = open_store(file_system=counting)
    second.acquire()
    num_opened = []
    for step in (10, 11, 12, 13):
        save(second, step)
        before = counting.counts["open"]
        second.retain(policy)
        num_opened.append(counting.counts["open"] - before)
    assert num_opened == [0, 0, 4 + 1, 1]  # and the owner record before each deletion


def test_retention_keeps_the_best_over_attempts(
    store: Store, save: Save, open_store: OpenStore, run_directory: Path
) -> None:
    policy = RetentionPolicy(keep_latest=1, keep_best=1)
    save(store, 1, metric=0.1)
    store.release()
    second = open_store()
    second.acquire()
    for step, metric in ((2, 0.5), (3, float("nan")), (4, 0.3)):
        save(second, step, metric=metric, policy=policy)
    assert _names(second) == ["step-00000004", "step-00000001"]
    assert list((run_directory / ".staging").iterdir()) == []


def test_retention_deletes_only_verified_checkpoints_of_this_run(
    store: Store, save: Save, open_store: OpenStore, tmp_path: Path, run_directory: Path
) -> None:
    other = open_store(tmp_path / "other")
    other.acquire()
    save(other, 2)
    for step in (1, 3, 4, 5):
        save(store, step)
    shutil.copytree(tmp_path / "other" / "step-00000002", run_directory / "step-00000002")
    (run_directory / "step-00000000").mkdir()
    store.release()
    (run_directory / "step-00000003" / MODEL).write_bytes(b"")
    second = open_store()
    second.acquire()
    save(second, 6)
    assert second.retain(RetentionPolicy(keep_latest=2)) == [StepName(1), StepName(4)]
    assert _names(second) == [
        "step-00000006", "step-00000005", "step-00000003", "step-00000002", "step-00000000",
    ]  # fmt: skip


def test_the_checkpoint_just_committed_stays_although_it_is_not_the_newest(
    store: Store, save: Save
) -> None:
    # A run that went back to an older step on purpose.
    save(store, 100)
    save(store, 50)
    assert store.retain(RetentionPolicy(keep_latest=1)) == []
    save(store, 60)
    assert store.retain(RetentionPolicy(keep_latest=1)) == [StepName(50)]


def test_deleted_checkpoints_are_gone_at_once_and_their_bytes_later(
    store: Store, save: Save, run_directory: Path
) -> None:
    for step in (1, 2, 3):
        save(store, step)
    assert store.retain(RetentionPolicy(keep_latest=1)) == [StepName(1), StepName(2)]
    assert _names(store) == ["step-00000003"]
    assert len(list((run_directory / ".staging").iterdir())) == 2
    store.empty_trash()
    assert list((run_directory / ".staging").iterdir()) == []
    store.empty_trash()


def test_trash_that_nobody_emptied_is_removed_before_the_space_is_checked(
    store: Store, save: Save, open_store: OpenStore, run_directory: Path
) -> None:
    for step in (1, 2):
        save(store, step)
    store.retain(RetentionPolicy(keep_latest=1))
    staging = store.stage(StepName(3), num_bytes=10, num_files=1, directories=[])
    assert [path.name for path in (run_directory / ".staging").iterdir()] == [staging.name]
    store.abandon(staging)
    save(store, 3)
    store.retain(RetentionPolicy(keep_latest=1))
    store.release()  # and the process ends before the trash is emptied
    open_store().acquire()
    assert list((run_directory / ".staging").iterdir()) == []


def test_one_directory_that_cannot_be_removed_does_not_keep_the_others(
    open_store: OpenStore, save: Save, run_directory: Path
) -> None:
    failing = FailpointFileSystem(LocalFileSystem())
    store = open_store(file_system=failing)
    store.acquire()
    for step in (1, 2, 3, 4):
        save(store, step)
    store.retain(RetentionPolicy(keep_latest=1))
    failing._plan = parse_failpoints(f"unlink:{failing.counts['unlink'] + 1}=EIO")
    with pytest.raises(SaveError, match=r"trash-step-00000001.*EIO"):
        store.empty_trash()
    (left,) = (run_directory / ".staging").iterdir()
    assert left.name.startswith("trash-step-00000001")
    save(store, 5)
    assert list((run_directory / ".staging").iterdir()) == []


def test_the_bytes_of_a_checkpoint_whose_removal_was_not_synced_stay(
    open_store: OpenStore, save: Save, run_directory: Path
) -> None:
    failing = FailpointFileSystem(LocalFileSystem())
    store = open_store(file_system=failing)
    store.acquire()
    for step in (1, 2):
        save(store, step)
    store.retain(RetentionPolicy(keep_latest=1))
    failing._plan = parse_failpoints(f"fsync_dir:{failing.counts['fsync_dir'] + 1}=EIO")
    with pytest.raises(SaveError, match="EIO"):
        store.empty_trash()
    store.empty_trash()
    for step in (3, 4):  # their syncs succeed, which proves nothing
        save(store, step, policy=RetentionPolicy(keep_latest=1))
    (kept,) = (run_directory / ".staging").iterdir()
    assert (kept / MODEL).read_bytes() == b"model/rank-00000.safetensors of step-00000001"
    store.release()
    open_store().acquire()
    assert list((run_directory / ".staging").iterdir()) == []


def test_a_failed_sync_of_a_quarantine_is_not_taken_for_one_of_the_trash(
    open_store: OpenStore, save: Save, run_directory: Path
) -> None:
    failing = FailpointFileSystem(LocalFileSystem())
    store = open_store(file_system=failing)
    store.acquire()
    for step in (1, 2, 3):
        save(store, step)
    store.retain(RetentionPolicy(keep_latest=2))
    (run_directory / "step-00000002" / MODEL).unlink()
    with pytest.raises(CorruptCheckpointError) as damage:
        store.open_step(StepName(2)).verify()
    counted = failing.counts["fsync_dir"]
    failing._plan = parse_failpoints(f"fsync_dir:{counted + 1}=EIO")
    store.quarantine(StepName(2), damage.value)
    store.empty_trash()
    (kept,) = (run_directory / ".staging").iterdir()
    assert kept.name.startswith("trash-step-00000001")


def test_a_pinned_checkpoint_is_deleted_only_once_nobody_reads_it(store: Store, save: Save) -> None:
    policy = RetentionPolicy(keep_latest=1)
    for step in (1, 2):
        save(store, step)
    for _ in range(2):
        store.pin(StepName(1))
    save(store, 3)
    assert store.retain(policy) == [StepName(2)]
    store.unpin(StepName(1))
    assert store.retain(policy) == []
    store.open_step(StepName(1)).verify()
    store.unpin(StepName(1))
    assert store.retain(policy) == [StepName(1)]
    with pytest.raises(AssertionError, match="step-00000001 is not pinned"):
        store.unpin(StepName(1))


def _pruned(store: Store, policy: RetentionPolicy, *, latest: int) -> list[StepName]:
    return list(iter(lambda: store.prune(policy, latest=StepName(latest)), None))


def test_on_a_full_disk_the_oldest_checkpoint_that_is_not_needed_goes(
    store: Store, save: Save
) -> None:
    metrics = {1: 0.5, 2: 0.1, 3: 0.5, 4: 0.5, 5: 0.5, 6: 0.5, 7: 0.5}
    for step, metric in metrics.items():
        save(store, step, metric=metric)
    store.pin(StepName(4))
    policy = RetentionPolicy(keep_latest=None, keep_best=0, keep_every=3)
    assert store.prune(policy, latest=StepName(5)) == StepName(1)
    assert _pruned(store, policy, latest=5) == []
    assert _pruned(store, replace(policy, keep_every=None), latest=5) == [StepName(3), StepName(6)]
    assert _names(store) == [f"step-0000000{step}" for step in (7, 5, 4, 2)]
    assert list((store.directory / ".staging").iterdir()) == []
    for name in store.step_names():
        store.open_step(name).verify()


def test_room_is_made_before_the_first_commit_but_never_by_damage_or_another_run(
    store: Store, save: Save, open_store: OpenStore
) -> None:
    for step in (1, 2, 3):
        save(store, step)
    store.release()
    (store.directory / "step-00000001" / "manifest.json").write_text("{}")
    second = open_store()
    second.acquire()
    assert _pruned(second, RetentionPolicy(), latest=3) == [StepName(2)]
    assert _names(second) == ["step-00000003", "step-00000001"]


def test_a_second_thread_that_changes_the_directory_is_refused(
    open_store: OpenStore, save: Save
) -> None:
    class Waiting(LocalFileSystem):
        def unlink(self, path: Path) -> None:
            reached.set()
            assert released.wait(10)
            super().unlink(path)

    reached, released = threading.Event(), threading.Event()
    store = open_store(file_system=Waiting())
    store.acquire()
    for step in (1, 2):
        save(store, step)
    store.retain(RetentionPolicy(keep_latest=1))
    background = threading.Thread(target=store.empty_trash)
    background.start()
    assert reached.wait(10)
    with pytest.raises(LoopError, match="another thread is changing it"):
        store.stage(StepName(3), num_bytes=1, num_files=1, directories=[])
    store.pin(StepName(2))
    store.open_step(StepName(2)).verify()
    released.set()
    background.join()
    save(store, 3)


def test_a_job_that_lost_the_directory_deletes_nothing(
    store: Store, save: Save, run_directory: Path
) -> None:
    for step in (1, 2, 3):
        save(store, step)
    (run_directory / "owner.json").write_bytes(b"")
    with pytest.raises(OwnershipLostError):
        store.retain(RetentionPolicy(keep_latest=1))
    with pytest.raises(OwnershipLostError):
        store.prune(RetentionPolicy(), latest=StepName(3))
    with pytest.raises(OwnershipLostError):
        store.quarantine(StepName(1), CorruptCheckpointError("x", found="y"))
    assert len(_names(store)) == 3


def test_an_abandoned_save_leaves_nothing_and_another_in_flight_is_not_touched(
    store: Store, run_directory: Path
) -> None:
    kept = store.stage(StepName(5), num_bytes=10, num_files=1, directories=["state"])
    given_up = store.stage(StepName(6), num_bytes=10, num_files=1, directories=["state"])
    given_up.create("state/a", writer=0).discard()
    for _ in range(2):
        store.abandon(given_up)
    store.stage(StepName(7), num_bytes=10, num_files=1, directories=[])
    assert kept.path.exists()
    assert not given_up.path.exists()
