"""Large aligned memory bypasses the page cache where the file system supports it."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resumekit.storage.io import direct
from resumekit.storage.io.direct import MIN_DIRECT_BYTES, _is_cached
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.io.pipeline import HostBuffer

SIZE = 3 * MIN_DIRECT_BYTES + 4096 + 77
O_DIRECT: int = getattr(os, "O_DIRECT", 0)


@pytest.fixture
def disk() -> Iterator[Path]:
    """A directory of a file system with direct I/O."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as name:
        path = Path(name, "probe")
        try:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | O_DIRECT))
        except OSError:
            pytest.skip("no direct I/O here")
        if not O_DIRECT:
            pytest.skip("no direct I/O here")
        yield Path(name)


@pytest.fixture
def image() -> memoryview:
    view = HostBuffer(SIZE).view
    view[:] = (bytes(range(251)) * (SIZE // 251 + 1))[:SIZE]
    return view


def _has_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & O_DIRECT)


def _num_cached_bytes(path: Path) -> int:
    with path.open("rb") as file:
        half = MIN_DIRECT_BYTES
        return half * sum(_is_cached(file.fileno(), at, half) for at in (0, half))


def test_a_large_write_bypasses_the_page_cache_and_its_odd_tail_does_not(
    disk: Path, image: memoryview
) -> None:
    local = LocalFileSystem()
    handle = local.create(disk / "x")
    local.write(handle, [image[: 2 * MIN_DIRECT_BYTES]])
    assert _has_direct(handle)
    assert _num_cached_bytes(disk / "x") == 0
    local.write(handle, [image[2 * MIN_DIRECT_BYTES :]])
    assert not _has_direct(handle)
    local.write(handle, [memoryview(b"more")])
    local.fsync(handle)
    local.close(handle)
    assert (disk / "x").read_bytes() == bytes(image) + b"more"


@pytest.mark.parametrize("begin", [0, 1, 4096])
def test_memory_and_offsets_of_any_alignment_are_written(
    disk: Path, image: memoryview, begin: int
) -> None:
    local = LocalFileSystem()
    handle = local.create(disk / "x")
    local.write(handle, [memoryview(bytes(begin))])
    local.write(handle, [image])
    local.write(handle, [image[1:], memoryview(b"small"), image])
    local.close(handle)
    whole = bytes(image)
    assert (disk / "x").read_bytes() == bytes(begin) + whole + whole[1:] + b"small" + whole


def test_small_writes_use_the_page_cache(disk: Path, image: memoryview) -> None:
    local = LocalFileSystem()
    handle = local.create(disk / "x")
    local.write(handle, [image[: MIN_DIRECT_BYTES - 4096]])
    assert not _has_direct(handle)
    local.close(handle)


def _refusing(name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Direct calls of this name fail with EINVAL, as on a device with larger blocks."""
    real: Callable[..., int] = getattr(os, name)
    refused = []

    def call(descriptor: int, *arguments: object) -> int:
        if _has_direct(descriptor):
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, name, call)
    return refused


def test_after_a_refused_direct_write_all_files_there_are_buffered(
    disk: Path,
    image: memoryview,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = _refusing("writev", monkeypatch)
    local = LocalFileSystem()
    with caplog.at_level(logging.DEBUG, "resumekit"):
        for name in "ab":
            handle = local.create(disk / name)
            local.write(handle, [image])
            local.close(handle)
            assert (disk / name).read_bytes() == bytes(image)
    assert len(refused) == 1
    assert caplog.messages == [
        f"{disk}: supports O_DIRECT, using direct I/O for large files",
        f"{disk}: refuses direct writes, using buffered I/O for large files",
    ]


def test_a_file_system_in_memory_is_buffered(
    tmp_path: Path, image: memoryview, caplog: pytest.LogCaptureFixture
) -> None:
    if not str(tmp_path).startswith("/dev/shm"):
        pytest.skip("no tmpfs here")
    local = LocalFileSystem()
    with caplog.at_level(logging.DEBUG, "resumekit"):
        handle = local.create(tmp_path / "x")
        local.write(handle, [image])
    assert not _has_direct(handle)
    local.close(handle)
    assert caplog.messages == [f"{tmp_path}: is on tmpfs, using buffered I/O for large files"]


def _read(path: Path) -> bytes:
    local, memory = LocalFileSystem(), HostBuffer(SIZE).view
    handle = local.open(path)
    done = 0
    while done < SIZE:
        num_bytes = local.read_into(handle, done, memory[done:])
        assert num_bytes
        done += num_bytes
    assert local.read_into(handle, SIZE, memory) == 0
    local.close(handle)
    return bytes(memory)


@pytest.mark.parametrize("refused", [False, True])
def test_a_cold_file_is_read_around_the_page_cache_where_that_is_possible(
    disk: Path, image: memoryview, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    local = LocalFileSystem()
    handle = local.create(disk / "x")
    local.write(handle, [image])
    local.close(handle)
    assert _num_cached_bytes(disk / "x") == 0
    if refused:
        _refusing("preadv", monkeypatch)
    before = len(os.listdir("/proc/self/fd"))
    assert _read(disk / "x") == bytes(image)
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    assert (_num_cached_bytes(disk / "x") > 0) == refused


def test_a_file_in_the_page_cache_is_read_from_there(
    disk: Path, image: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    (disk / "x").write_bytes(image)
    (disk / "x").read_bytes()
    refused = _refusing("preadv", monkeypatch)
    assert _read(disk / "x") == bytes(image)
    assert refused == []


@pytest.mark.parametrize("num_parts", [1, 2])
def test_each_part_of_a_file_is_judged_by_its_first_read(
    disk: Path, image: memoryview, monkeypatch: pytest.MonkeyPatch, num_parts: int
) -> None:
    (disk / "x").write_bytes(image)
    judged: list[int] = []

    def is_cached(descriptor: int, offset: int, num_bytes: int) -> bool:
        judged.append(offset)
        return _is_cached(descriptor, offset, num_bytes)

    monkeypatch.setattr(direct, "_is_cached", is_cached)
    monkeypatch.setattr(direct, "_JUDGED_BYTES", 2 * MIN_DIRECT_BYTES // num_parts)
    local, memory = LocalFileSystem(), HostBuffer(SIZE).view
    handle = local.open(disk / "x")
    for begin in (0, MIN_DIRECT_BYTES, 0):
        local.read_into(handle, begin, memory[begin : begin + MIN_DIRECT_BYTES])
    local.close(handle)
    assert memory[: 2 * MIN_DIRECT_BYTES] == image[: 2 * MIN_DIRECT_BYTES]
    assert judged == [0, MIN_DIRECT_BYTES][:num_parts]
