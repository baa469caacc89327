"""Files whose pages are used again hold what was written to them, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resumekit.storage.io import shared_memory
from resumekit.storage.io.shared_memory import SharedMemoryFileSystem

CONTENTS = st.lists(st.binary(min_size=0, max_size=60).map(bytearray), max_size=4)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of 16 bytes count as large."""
    monkeypatch.setattr(shared_memory, "_MIN_BYTES", 16)


def make(root: Path) -> SharedMemoryFileSystem:
    (root / "spare").mkdir(exist_ok=True)
    return SharedMemoryFileSystem(root / "spare")


def write(files: SharedMemoryFileSystem, path: Path, content: list[bytearray]) -> None:
    handle = files.create(path)
    for part in content:
        files.write(handle, [memoryview(part)])
    files.fsync(handle)
    files.close(handle)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from("ab"), CONTENTS), min_size=1, max_size=12))
def test_a_new_file_holds_what_was_written_whatever_pages_it_has(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[tuple[str, list[bytearray]]]
) -> None:
    root = tmp_path_factory.mktemp("root")
    files, there = make(root), dict[str, bytes]()
    for number, (name, content) in enumerate(rounds):
        folder = root / str(number) / "state"
        folder.mkdir(parents=True)
        write(files, folder / name, content)
        there[f"{number}/state/{name}"] = b"".join(content)
        old = f"{number - 1}/state/{rounds[number - 1][0]}"
        if number and number % 3:
            files.unlink(root / old)
            there.pop(old)
        for path, expected in there.items():
            assert (root / path).read_bytes() == expected


def test_the_pages_of_a_removed_file_are_used_again(tmp_path: Path) -> None:
    files = make(tmp_path)
    write(files, tmp_path / "a", [bytearray(b"a" * 40)])
    inode = (tmp_path / "a").stat().st_ino
    files.unlink(tmp_path / "a")
    assert files.free(tmp_path).num_bytes >= 40
    assert [path.name for path in (tmp_path / "spare").iterdir()] == [str(inode)]
    write(files, tmp_path / "a", [bytearray(b"b" * 24)])
    assert (tmp_path / "a").stat().st_ino == inode
    assert (tmp_path / "a").read_bytes() == b"b" * 24
    assert not [*(tmp_path / "spare").iterdir()]


def test_a_path_that_exists_is_never_replaced(tmp_path: Path) -> None:
    files = make(tmp_path)
    write(files, tmp_path / "a", [bytearray(40)])
    files.unlink(tmp_path / "a")
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        files.create(tmp_path / "a")
    assert (tmp_path / "a").read_text() == "mine"


def test_spare_files_that_nobody_takes_are_removed(tmp_path: Path) -> None:
    files = make(tmp_path)
    write(files, tmp_path / "a", [bytearray(40)])
    files.unlink(tmp_path / "a")
    files.remove_spare()
    assert os.listdir(tmp_path / "spare") == []
    write(files, tmp_path / "a", [bytearray(b"b" * 40)])
    assert (tmp_path / "a").read_bytes() == b"b" * 40
