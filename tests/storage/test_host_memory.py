from __future__ import annotations

import faulthandler
import mmap
import os
import re
import signal
from pathlib import Path

import pytest

from resumekit.storage.io.direct import address_of
from resumekit.storage.io.pipeline import ALIGNMENT, HostBuffer, use_huge_pages

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def _mapping(address: int) -> dict[str, int]:
    """The kB figures of the mapping that holds an address; the system joins neighbours to one."""
    found: dict[str, int] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if borders := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(borders[1], 16) <= address < int(borders[2], 16)
        elif inside and (figure := re.match(r"(\w+): +(\d+) kB", line)):
            found[figure[1]] = int(figure[2])
    return found


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, ALIGNMENT - 1, ALIGNMENT, 5 * ALIGNMENT + 77])
def test_a_buffer_has_its_size_its_alignment_and_zeros(num_bytes: int) -> None:
    buffer = HostBuffer(num_bytes)
    assert (buffer.num_bytes, buffer.view.nbytes) == (num_bytes, num_bytes)
    assert not buffer.view.readonly
    assert address_of(buffer.view) % ALIGNMENT == 0
    assert bytes(buffer.view) == bytes(num_bytes)
    buffer.release()


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="no transparent huge pages here"
)
def test_a_touched_buffer_is_in_huge_pages() -> None:
    buffer = HostBuffer(8 * ALIGNMENT)
    before = _mapping(address_of(buffer.view))
    buffer.touch()
    after = _mapping(address_of(buffer.view))
    assert after["Rss"] - before["Rss"] == (8 * ALIGNMENT) >> 10
    # Not all: the system may be short of free huge pages.
    assert after["AnonHugePages"] - before["AnonHugePages"] >= ALIGNMENT >> 10


@pytest.mark.parametrize("populate", [23, -1], ids=["populated", "written"])
def test_touching_faults_every_page_in_and_changes_none(
    monkeypatch: pytest.MonkeyPatch, populate: int
) -> None:
    monkeypatch.setattr("resumekit.storage.io.pipeline._POPULATE_WRITE", populate)
    buffer = HostBuffer(3 * ALIGNMENT + 5000)
    before = _mapping(address_of(buffer.view))["Rss"]
    buffer.view[7:9] = b"ab"
    buffer.touch()
    grown = _mapping(address_of(buffer.view))["Rss"] - before
    assert grown >= (3 * ALIGNMENT + 8192) >> 10
    assert bytes(buffer.view[:4096]) == bytes(7) + b"ab" + bytes(4087)


def test_a_forked_child_does_not_have_the_memory() -> None:
    buffer = HostBuffer(ALIGNMENT)
    buffer.touch()
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # the crash is wanted
        buffer.view[0] = 1
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV


def test_released_memory_is_given_back_once_nobody_uses_it() -> None:
    buffer = HostBuffer(4 * ALIGNMENT)
    buffer.touch()
    address, slice_in_use = address_of(buffer.view), buffer.view[10:20]
    buffer.release()
    slice_in_use[0] = 5
    assert _mapping(address)["Rss"] >= 4 * ALIGNMENT >> 10
    del slice_in_use, buffer
    assert _mapping(address).get("Rss", 0) < ALIGNMENT >> 10


def _flags(address: int) -> list[str]:
    """The flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if borders := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(borders[1], 16) <= address < int(borders[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    return []


@pytest.mark.skipif(not THP.exists(), reason="no transparent huge pages here")
@pytest.mark.parametrize("is_large", [True, False])
def test_huge_pages_are_wanted_for_large_memory_only(is_large: bool) -> None:
    mapping = mmap.mmap(-1, 4 * ALIGNMENT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping[100:102] = b"ab"
    memory = memoryview(mapping)[: (2 * ALIGNMENT if is_large else 5000)]
    use_huge_pages(memory)
    assert ("hg" in _flags(address_of(memory))) == is_large
    assert bytes(memory[99:103]) == b"\0ab\0"


def test_a_system_without_huge_pages_leaves_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    memory = memoryview(bytearray(2 * ALIGNMENT))
    use_huge_pages(memory)
    assert not any(memory)
