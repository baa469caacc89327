from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from failpoints import FailpointFileSystem, parse_failpoints

from resumekit.errors import (
    CheckpointError,
    ConfigurationError,
    DirectoryError,
    DirectoryInUseError,
    OwnershipLostError,
    SharedDirectoryError,
)
from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.ownership import NoLock, Owner, PosixLock
from resumekit.storage.store import Store

OpenStore = Callable[..., Store]
Save = Callable[..., StepName]

_OWNER = """
import os, sys, time
from resumekit.storage.store import Store
store = Store(sys.argv[1])
store.acquire()
child = os.fork() if sys.argv[2] == "with child" else -1
if child:
    print(child, flush=True)
time.sleep(60)
"""


@contextmanager
def _other_job(directory: Path, *, with_child: bool = False) -> Iterator[tuple[int, int]]:
    """The pids of a live owner and of its forked child."""
    word = "with child" if with_child else "alone"
    command = [sys.executable, "-c", _OWNER, str(directory), word]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process.pid, child
        finally:
            process.kill()
            if child > 0:
                os.kill(child, signal.SIGKILL)


def test_a_missing_directory_is_made_with_its_parents(
    open_store: OpenStore, run_directory: Path
) -> None:
    owner = open_store().acquire()
    assert (run_directory / ".staging").is_dir()
    assert (owner.pid, len(owner.run_id), len(owner.attempt)) == (os.getpid(), 32, 32)


def test_the_run_keeps_its_id_and_each_attempt_has_its_own(open_store: OpenStore) -> None:
    first = open_store()
    one = first.acquire()
    first.release()
    two = open_store().acquire()
    assert one.run_id == two.run_id
    assert one.attempt != two.attempt


def test_a_directory_that_another_live_job_owns_is_refused(
    open_store: OpenStore, run_directory: Path
) -> None:
    with _other_job(run_directory) as (pid, _):
        before = (run_directory / "owner.json").read_bytes()
        with pytest.raises(DirectoryInUseError, match=f"in use by process {pid} on .+ started"):
            open_store().acquire()
        assert (run_directory / "owner.json").read_bytes() == before


def test_the_children_of_a_killed_owner_lock_nobody_out(
    open_store: OpenStore, run_directory: Path
) -> None:
    with _other_job(run_directory, with_child=True) as (pid, child):
        os.kill(pid, signal.SIGKILL)
        os.kill(child, 0)  # it is alive
        Store(run_directory, lock=PosixLock(wait_seconds=10.0)).acquire()
        os.kill(child, 0)


def test_a_lock_is_waited_for_while_its_owner_is_dying(run_directory: Path) -> None:
    with (
        _other_job(run_directory) as (pid, _),
        subprocess.Popen(["/bin/sh", "-c", f"sleep 0.3; kill -9 {pid}"]),
    ):
        Store(run_directory, lock=PosixLock(wait_seconds=10.0)).acquire()


def test_the_same_process_cannot_own_a_directory_twice(
    open_store: OpenStore, run_directory: Path, tmp_path: Path
) -> None:
    first = open_store()
    first.acquire()
    (tmp_path / "link").symlink_to(run_directory)
    for directory in (run_directory, tmp_path / "link", run_directory / ".." / "a"):
        with pytest.raises(DirectoryInUseError, match=f"process {os.getpid()}"):
            open_store(directory).acquire()
    with pytest.raises(DirectoryInUseError):
        first.acquire()
    # And the refusals have not dropped the lock, which closing any descriptor of it would.
    status = _in_a_child(lambda: open_store().acquire())
    assert status == "DirectoryInUseError"
    first.release()
    open_store().acquire()


@pytest.fixture
def _no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collections")
def test_a_store_that_nothing_refers_to_any_more_does_not_keep_its_directory(
    open_store: OpenStore,
) -> None:
    class Program:
        store: Store
        itself: Program

    program = Program()
    program.store, program.itself = open_store(), program
    program.store.acquire()
    with pytest.raises(DirectoryInUseError):
        open_store().acquire()
    del program
    open_store().acquire()


def _in_a_child(work: Callable[[], object]) -> str:
    """The name of the error that the work ends with in a forked child; empty for none."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        name = b""
        try:
            work()
        except DirectoryError as error:
            name = type(error).__name__.encode()
        os.write(write_end, name)
        os._exit(0)
    os.close(write_end)
    os.waitpid(pid, 0)
    with open(read_end, "rb") as pipe:
        return pipe.read().decode()


def test_a_forked_child_cannot_release_its_parents_lock(open_store: OpenStore) -> None:
    store = open_store()
    store.acquire()
    assert _in_a_child(store.release) == ""
    assert _in_a_child(lambda: open_store().acquire()) == "DirectoryInUseError"


def test_a_store_that_is_dropped_lets_others_in(open_store: OpenStore) -> None:
    store = open_store()
    store.acquire()
    del store
    open_store().acquire()


def test_release_may_be_called_by_anybody_at_any_time(open_store: OpenStore) -> None:
    store = open_store()
    store.release()
    store.acquire()
    store.release()
    store.release()
    store.acquire()


def _in_turn(*steps: Callable[[Path], object]) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        for step in steps:
            step(path)

    return run


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:40]),
        lambda path: path.write_bytes(path.read_bytes().replace(b'"pid"', b'"pie"')),
        lambda path: path.write_bytes(b"\x00" * 300),
        lambda path: path.write_bytes(b"x" * 100_000),
        _in_turn(Path.unlink, lambda path: path.symlink_to("/etc/passwd")),
        _in_turn(Path.unlink, lambda path: path.symlink_to("/nowhere")),
        _in_turn(Path.unlink, os.mkfifo),
    ],
    ids=["gone", "empty", "half", "flipped", "zeros", "huge", "link", "dangling", "pipe"],
)
def test_a_damaged_record_locks_nobody_out_of_the_run(
    open_store: OpenStore, save: Save, run_directory: Path, damage: Callable[[Path], object]
) -> None:
    first = open_store()
    first.acquire()
    name = save(first, 5)
    first.release()
    damage(run_directory / "owner.json")
    second = open_store()
    second.acquire()
    assert second.run_id == first.run_id
    second.open_step(name).verify()


def test_no_single_flip_in_the_record_can_change_the_runs_id(
    open_store: OpenStore, save: Save, run_directory: Path
) -> None:
    store = open_store()
    store.acquire()
    data = store._owner.to_bytes() if store._owner else b""
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(CheckpointError):
            Owner.from_bytes(bytes(damaged))


def test_without_a_record_the_newest_manifest_that_verifies_knows_the_run(
    open_store: OpenStore, save: Save, run_directory: Path
) -> None:
    first = open_store()
    first.acquire()
    save(first, 5)
    newest = save(first, 10)
    first.release()
    (run_directory / "owner.json").unlink()
    (run_directory / str(newest) / "manifest.json").write_bytes(b"{}")
    second = open_store()
    second.acquire()
    assert second.run_id == first.run_id


def test_a_new_id_is_never_given_while_the_old_one_may_be_readable_later(
    open_store: OpenStore, save: Save, run_directory: Path
) -> None:
    first = open_store()
    first.acquire()
    save(first, 5)
    first.release()
    (run_directory / "owner.json").unlink()
    failing = FailpointFileSystem(LocalFileSystem(), parse_failpoints("read_into:1=EIO"))
    with pytest.raises(CheckpointError, match="EIO"):
        open_store(file_system=failing).acquire()
    second = open_store()
    second.acquire()
    assert second.run_id == first.run_id


def test_an_unreadable_record_does_not_matter_where_a_manifest_is_readable(
    open_store: OpenStore, save: Save
) -> None:
    first = open_store()
    first.acquire()
    save(first, 5)
    first.release()
    failing = FailpointFileSystem(LocalFileSystem(), parse_failpoints("open:1=EIO"))
    second = open_store(file_system=failing)
    second.acquire()
    assert second.run_id == first.run_id


def test_a_directory_that_cannot_be_used_is_reported_in_one_line(
    open_store: OpenStore, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(DirectoryError, match=r"file.*: could not be .*ENOTDIR"):
            open_store(directory).acquire()


@pytest.mark.parametrize(
    "call", ["mkdir", "create", "write", "fsync", "rename", "fsync_dir", "list"]
)
def test_a_directory_that_takes_no_write_is_a_directory_error(
    open_store: OpenStore, call: str, run_directory: Path
) -> None:
    run_directory.mkdir(parents=True)
    # The first mkdir only finds out that the directory is there.
    plan = parse_failpoints(f"{call}:{2 if call == 'mkdir' else 1}+=EROFS")
    failing = FailpointFileSystem(LocalFileSystem(), plan)
    with pytest.raises(DirectoryError, match="EROFS") as caught:
        open_store(file_system=failing).acquire()
    assert caught.type is DirectoryError
    open_store().acquire()  # the failed one holds nothing


def test_a_parent_that_may_not_be_read_does_not_matter(open_store: OpenStore) -> None:
    failing = FailpointFileSystem(LocalFileSystem(), parse_failpoints("fsync_dir:1=EACCES"))
    open_store(file_system=failing).acquire()


@pytest.mark.parametrize("name", [".lock", ".staging"])
def test_a_link_instead_of_a_private_name_is_not_followed(
    open_store: OpenStore, run_directory: Path, tmp_path: Path, name: str
) -> None:
    run_directory.mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    (run_directory / name).symlink_to(outside if name == ".staging" else outside / "made")
    with pytest.raises(DirectoryError):
        open_store().acquire()
    assert [path.name for path in outside.iterdir()] == ["precious"]


def test_what_earlier_attempts_left_in_staging_is_swept(
    open_store: OpenStore, run_directory: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    left = run_directory / ".staging" / "step-00000005-old" / "state" / "deep"
    left.mkdir(parents=True)
    (left / "file").write_bytes(b"x")
    (left / "link").symlink_to(outside)
    (run_directory / ".staging" / "owner-old").write_bytes(b"x")
    os.mkfifo(run_directory / ".staging" / "pipe")
    open_store().acquire()
    assert list((run_directory / ".staging").iterdir()) == []
    assert (outside / "precious").exists()


def test_other_ranks_join_the_attempt_that_they_see(
    open_store: OpenStore, tmp_path: Path, store: Store
) -> None:
    other = open_store()
    other.join(store.run_id, store.attempt, wait_seconds=0.0)
    assert (other.run_id, other.attempt) == (store.run_id, store.attempt)
    with pytest.raises(SharedDirectoryError, match="the owner record of process"):
        open_store().join(store.run_id, "0" * 32, wait_seconds=0.0)
    with pytest.raises(SharedDirectoryError, match="no owner record"):
        open_store(tmp_path / "elsewhere").join(store.run_id, store.attempt, wait_seconds=0.0)


def test_only_the_owner_may_write(open_store: OpenStore, store: Store) -> None:
    other = open_store()
    with pytest.raises(ConfigurationError, match="neither acquired nor joined"):
        _ = other.run_id
    other.join(store.run_id, store.attempt)
    with pytest.raises(ConfigurationError, match="after acquire"):
        other.stage(StepName(1), num_bytes=1, num_files=1, directories=[])


def test_a_rank_that_outlived_its_job_cannot_commit(
    run_directory: Path, save: Save, store: Store
) -> None:
    save(store, 5)
    staging = store.stage(StepName(10), num_bytes=1, num_files=1, directories=["state"])
    # A second owner gets in although the first one lives, as on a file system without locks.
    second = Store(run_directory, lock=NoLock())
    second.acquire()
    assert not staging.path.exists()
    for attempt in (
        lambda: save(store, 10),
        lambda: store.stage(StepName(10), num_bytes=1, num_files=1, directories=[]),
    ):
        with pytest.raises(OwnershipLostError, match="names process"):
            attempt()
    assert [str(name) for name in second.step_names()] == ["step-00000005"]
    (run_directory / "owner.json").unlink()
    with pytest.raises(OwnershipLostError, match="is missing or damaged"):
        save(second, 10)


def test_a_commit_reads_the_owner_again_before_the_rename(
    run_directory: Path, open_store: OpenStore, save: Save, store: Store, make_manifest: Any
) -> None:
    save(store, 5)
    staging = store.stage(StepName(10), num_bytes=1, num_files=1, directories=["state"])
    with staging.create("state/a", writer=0) as writer:
        writer.write([memoryview(b"a")])
        entry = writer.finish()
    # Another job has taken over; it has not swept the staging directory yet.
    other = Owner.of_this_process(store.run_id)
    (run_directory / "owner.json").write_bytes(other.to_bytes())
    manifest = make_manifest(
        run_id=store.run_id, attempt=store.attempt, name=StepName(10), files=[entry]
    )
    with pytest.raises(OwnershipLostError, match="names process"):
        store.commit(staging, manifest)
    assert [str(name) for name in open_store().step_names()] == ["step-00000005"]


def test_a_copied_or_moved_directory_goes_on_as_the_same_run(
    open_store: OpenStore, save: Save, run_directory: Path, tmp_path: Path, store: Store
) -> None:
    name = save(store, 5)
    shutil.copytree(run_directory, tmp_path / "copy")
    store.release()
    run_directory.rename(tmp_path / "moved")
    for folder in ("copy", "moved"):
        other = open_store(tmp_path / folder)
        other.acquire()
        assert other.run_id == store.run_id
        other.open_step(name).verify()
        save(other, 10)
