from __future__ import annotations

import ast
import errno
import logging
import mmap
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import resumekit.storage
from resumekit.storage.io.direct import MIN_DIRECT_BYTES
from resumekit.storage.io.file_system import Entry, LocalFileSystem
from resumekit.storage.store import Store


@pytest.fixture
def local() -> LocalFileSystem:
    return LocalFileSystem()


def _write(local: LocalFileSystem, path: Path, *parts: bytes) -> None:
    handle = local.create(path)
    local.write(handle, [memoryview(part) for part in parts])
    local.writeback(handle, 0, 1)
    local.fsync(handle)
    local.close(handle)


def test_all_buffers_arrive_in_order_however_many_there_are(
    local: LocalFileSystem, tmp_path: Path
) -> None:
    parts = [b"%d," % number for number in range(3000)]  # more than one writev takes
    _write(local, tmp_path / "a", *parts, b"", b"end")
    assert (tmp_path / "a").read_bytes() == b"".join(parts) + b"end"


def test_a_short_write_is_continued_where_it_stopped(
    local: LocalFileSystem, tmp_path: Path
) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    content = bytes(range(256)) * 4096  # sixteen times what a pipe holds
    received = bytearray()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        local.write(write_end, [memoryview(content[:1000]), memoryview(content[1000:])])
        os._exit(0)
    os.close(write_end)
    os.set_blocking(read_end, True)
    while chunk := os.read(read_end, 7777):
        received += chunk
    os.close(read_end)
    os.waitpid(pid, 0)
    assert bytes(received) == content


def test_a_file_is_never_created_over_anything(local: LocalFileSystem, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "dangling"):
        with pytest.raises(FileExistsError):
            local.create(tmp_path / name)
    assert not (tmp_path / "nowhere").exists()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), os.mkdir, _socket],
    ids=["pipe", "link", "directory", "socket"],
)
def test_only_regular_files_are_opened(
    local: LocalFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    make(tmp_path / "x")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"not a regular file|symbolic|No such device"):
        local.open(tmp_path / "x")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_listing_says_what_each_name_is_and_follows_nothing(
    local: LocalFileSystem, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    assert local.list(tmp_path) == [
        Entry("directory", "directory"),
        Entry("file", "file", 5),
        Entry("link", "other"),
        Entry("pipe", "other"),
    ]


def test_bytes_are_read_from_any_offset(local: LocalFileSystem, tmp_path: Path) -> None:
    _write(local, tmp_path / "a", b"0123456789")
    handle = local.open(tmp_path / "a")
    assert handle.size == 10
    local.advise_sequential(handle)
    buffer = bytearray(4)
    assert local.read_into(handle, 3, memoryview(buffer)) == 4
    assert buffer == b"3456"
    assert local.read_into(handle, 10, memoryview(buffer)) == 0
    local.close(handle)


def test_free_room_is_what_the_system_says(local: LocalFileSystem, tmp_path: Path) -> None:
    free = local.free(tmp_path)
    assert free.num_bytes > 0
    assert free.num_inodes is None or free.num_inodes > 0


def test_no_other_module_touches_files() -> None:
    # os and pathlib calls that would bypass the file system; the lock is no file of a checkpoint.
    harmless = {"getpid", "strerror", "register_at_fork", "sched_getaffinity", "cpu_count"}
    lock = {"PosixLock", "_unlock"}
    io_methods = {
        "open", "mkdir", "rename", "unlink", "rmdir", "exists", "is_file", "is_dir", "stat",
        "iterdir", "glob", "read_bytes", "read_text", "write_bytes", "write_text", "touch",
        "resolve", "lstat", "symlink_to",
    }  # fmt: skip
    for path in sorted(Path(resumekit.storage.__file__).parent.rglob("*.py")):
        if path.name in ("file_system.py", "direct.py", "shared_memory.py"):
            continue
        tree = ast.parse(path.read_text())
        tree.body = [part for part in tree.body if getattr(part, "name", "") not in lock]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "open", f"{path.name}:{node.lineno}"
            if not isinstance(node, ast.Attribute):
                continue
            owner = ast.unparse(node.value)
            if owner == "os":
                assert node.attr in harmless, f"{path.name}:{node.lineno}: os.{node.attr}"
            elif node.attr in io_methods:
                seam = owner in {"file_system", "self._file_system", "self._inner"}
                assert seam, f"{path.name}:{node.lineno}: {owner}.{node.attr}"


def test_a_directory_that_cannot_be_synced_is_reported_once(
    local: LocalFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    number = errno.EINVAL
    with caplog.at_level(logging.INFO, "resumekit"):
        local.fsync_dir(tmp_path)
        local.fsync_dir(tmp_path)
    found = f"{tmp_path} cannot be synced: a power cut may undo the newest save"
    assert caplog.messages == [found]
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        local.fsync_dir(tmp_path)


def test_what_a_new_run_directory_supports_is_known_in_50_ms(tmp_path: Path) -> None:
    """Its locks, syncs and rename, as the first launch finds them; and direct I/O of a file."""

    def seconds(directory: Path) -> float:
        began = time.perf_counter()
        file_system = LocalFileSystem()
        store = Store(directory, file_system=file_system)
        store.acquire()
        handle = file_system.create(directory / "file")
        file_system.write(handle, [memoryview(image)])
        file_system.close(handle)
        took = time.perf_counter() - began
        store.release()
        return took

    image = mmap.mmap(-1, MIN_DIRECT_BYTES)
    assert min(seconds(tmp_path / f"run-{number}") for number in range(10)) <= 0.05
