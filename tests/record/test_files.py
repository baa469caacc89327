"""The journal's files: what is written is read again, and damage is left out."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from small_volumes import fill, tmpfs

from resumekit.record.conditions import Header
from resumekit.record.journal import (
    RECORD_BYTES,
    Has,
    JournalFile,
    Record,
    find_attempts,
    limit_earlier,
    name_of,
    number_of_attempt,
    thin,
)

HEADER = Header("run", "a" * 32, 1, 0, 1, 0, True, ("aaaaaaaa",), None, {"horizon": {"steps": 9}})


def write(directory: Path, steps: range, header: Header = HEADER, **limits: int) -> JournalFile:
    path = directory / name_of(header.number, header.attempt, header.rank)
    file = JournalFile(path, header, **limits)
    for step in steps:
        file.append(Record(step, ids=step * 7, loss=0.1 * step, has=Has.IDS | Has.LOSS).to_bytes())
    return file


def steps_in(directory: Path, *, after: int = 0) -> list[int]:
    return [one.step for each in find_attempts(directory) for one in each.records(after=after)]


def test_a_record_has_its_size_and_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = Record(2**40, 5, 2**64 - 1, 3, 4, 5, 6, 7, 1e-3, float("inf"), 8, 9, 55, 1)
    assert len(record.to_bytes()) == RECORD_BYTES == 96
    write(tmp_path, range(0)).append(record.to_bytes())
    (attempt,) = find_attempts(tmp_path)
    assert (attempt.header, attempt.records()) == (HEADER, [record])


def test_a_torn_last_record_and_a_damaged_one_are_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, range(1, 6))
    file.append(Record(6).to_bytes()[:50])
    data = bytearray(file.path.read_bytes())
    data[-50 - 2 * RECORD_BYTES] ^= 1  # in the record of step 4
    file.path.write_bytes(data)
    assert steps_in(tmp_path) == [1, 2, 3, 5]


@pytest.mark.parametrize("offset", [0, 9, 40])
def test_a_file_with_a_damaged_header_is_left_out(tmp_path: Path, offset: int) -> None:
    path = write(tmp_path, range(1, 6)).path
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    assert find_attempts(tmp_path) == []
    path.write_bytes(data[:7])
    assert find_attempts(tmp_path) == []


def test_a_header_of_a_newer_format_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, range(1, 3)).path
    content = HEADER.to_bytes()
    assert Header.from_bytes(content) == HEADER
    assert Header.from_bytes(content.replace(b'"format_version":1', b'"format_version":2')) is None
    assert Header.from_bytes(b"[]") is None
    assert path.exists()


def test_a_header_that_an_earlier_version_wrote_is_read() -> None:
    assert Header.from_bytes(HEADER.to_bytes().replace(b',"fed_by":""', b"")) == HEADER


def test_attempts_are_numbered_and_all_ranks_of_one_have_its_number(tmp_path: Path) -> None:
    assert number_of_attempt(tmp_path / "missing", "a" * 32) == 1
    write(tmp_path, range(1))
    assert number_of_attempt(tmp_path, "a" * 32) == 1
    assert number_of_attempt(tmp_path, "b" * 32) == 2


def test_a_long_file_keeps_its_newest_records_and_every_hundredth_of_the_others(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, range(1, 1001)).path
    thin(path, num_kept=10)
    assert steps_in(tmp_path) == [*range(100, 901, 100), *range(991, 1001)]
    assert steps_in(tmp_path, after=900) == [*range(991, 1001)]
    assert os.listdir(tmp_path) == [path.name]


def test_a_file_never_grows_above_its_limit(tmp_path: Path) -> None:
    limit = 200 * RECORD_BYTES
    file = write(tmp_path, range(1, 10_001), max_bytes=limit)
    assert file.path.stat().st_size <= limit
    found = steps_in(tmp_path)
    assert found[-50:] == [*range(9951, 10_001)]
    assert found[0] % 100 == 0


def test_a_file_that_cannot_be_thinned_closes_no_other_one(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "volume", num_bytes=1 << 20) as volume:
        file = write(volume, range(1, 11), max_bytes=20 * RECORD_BYTES)
        fill(volume)
        with pytest.raises(OSError, match="No space left"):
            file.append(b"".join(Record(step).to_bytes() for step in range(11, 26)))
        other = os.open(os.devnull, os.O_RDONLY)
        file.close()
        os.close(other)
        assert steps_in(volume) == [*range(1, 26)]


def test_files_of_earlier_attempts_are_thinned_and_then_removed(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        write(tmp_path, range(1, 1001), replace(HEADER, attempt=str(number) * 32, number=number))
    limit_earlier(tmp_path, 0, max_bytes=200 * RECORD_BYTES * 10)
    assert len(steps_in(tmp_path)) == 10 + 1000 + 1000 - 990
    limit_earlier(tmp_path, 0, max_bytes=20 * RECORD_BYTES)
    (left,) = find_attempts(tmp_path)
    assert left.header.number == 3


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, range(1, 3))
    size = file.path.stat().st_size
    child = os.fork()
    if child == 0:
        file.append(Record(3).to_bytes())
        file.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert file.path.stat().st_size == size
    file.append(Record(3).to_bytes())  # closing in the child did not close it here
    assert steps_in(tmp_path) == [1, 2, 3]
