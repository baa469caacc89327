"""Copies of tensors: large ones by several threads, which end with the copy; others by blocks."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from resumekit.errors import SaveError
from resumekit.serialization import leaves
from resumekit.serialization.leaves import Leaf, ParallelCopies, bytes_leaf, element_type, pieces_of

NUM_TENSORS, NUM_BYTES = 5, (3 << 20) + 11


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A thread for each MiB, and none of them left."""
    monkeypatch.setattr(leaves, "_BYTES_PER_THREAD", 1 << 20)
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def prepared(num_threads: int) -> tuple[ParallelCopies, torch.Tensor, torch.Tensor]:
    """Copies into memory of other content, that memory, and what it is to hold."""
    sources = torch.arange(NUM_TENSORS * NUM_BYTES).to(torch.uint8)
    target = torch.full_like(sources, 99)
    copies = ParallelCopies(target, num_threads=num_threads)
    for number, each in enumerate(sources.split(NUM_BYTES)):
        copies.add(each, number * NUM_BYTES, NUM_BYTES)
    return copies, target, sources


@pytest.mark.parametrize("num_threads", [1, 2, 4, 100])
def test_every_byte_is_copied(num_threads: int) -> None:
    copies, target, expected = prepared(num_threads)
    assert not target.equal(expected)
    copies.run()
    assert target.equal(expected)


@pytest.mark.parametrize(("num_threads", "num_used"), [(1, 1), (3, 3)])
def test_as_many_threads_copy_as_are_allowed(
    num_threads: int, num_used: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_copy = threading.Barrier(num_used)
    move, threads = ctypes.memmove, set[int]()

    def noted(*given: Any) -> None:
        if threading.get_ident() not in threads:
            threads.add(threading.get_ident())
            all_copy.wait(20)
        move(*given)

    monkeypatch.setattr(ctypes, "memmove", noted)
    copies, target, expected = prepared(num_threads)
    copies.run()
    assert len(threads) == num_used
    assert target.equal(expected)


def test_little_is_copied_by_the_caller_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "_BYTES_PER_THREAD", NUM_TENSORS * NUM_BYTES)
    monkeypatch.setattr(threading, "Thread", None)
    copies, target, expected = prepared(4)
    copies.run()
    assert target.equal(expected)


def test_without_a_thread_the_caller_copies_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    copies, target, expected = prepared(4)
    copies.run()
    assert target.equal(expected)


def test_it_copies_while_the_interpreter_exits() -> None:
    script = """
import atexit, torch
from resumekit.serialization.leaves import ParallelCopies
source, target = torch.ones(1 << 28, dtype=torch.uint8), torch.zeros(1 << 28, dtype=torch.uint8)
def copy():
    copies = ParallelCopies(target, num_threads=4)
    copies.add(source, 0, source.nbytes)
    copies.run()
    print(target.equal(source))
atexit.register(copy)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "True\n"
    assert not done.stderr


def fail_once(error: BaseException, *, in_helper: bool) -> Any:
    """A copy that fails the first time that the caller, or a helper, is at it."""
    move, caller, failed = ctypes.memmove, threading.get_ident(), threading.Event()

    def copy(*given: Any) -> None:
        if (threading.get_ident() == caller) == in_helper:
            failed.wait(20)
        elif not failed.is_set():
            failed.set()
            raise error
        move(*given)

    return copy


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_fails_fails_the_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "memmove", fail_once(MemoryError(), in_helper=True))
    copies, _, _ = prepared(2)
    with pytest.raises(SaveError, match="a thread that has failed"):
        copies.run()


def test_an_interrupt_ends_the_copy() -> None:
    copies, target, expected = prepared(2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ctypes, "memmove", fail_once(KeyboardInterrupt(), in_helper=False))
        with pytest.raises(KeyboardInterrupt):
            copies.run()
    assert not target.equal(expected)


# Blocks


def many_leaves() -> list[Leaf]:
    """Some lie in memory as they are stored, others do not; one is longer than a block."""
    numbers = torch.complex(torch.arange(3000.0), -torch.arange(3000.0)).view(30, 100)
    tensors = [
        numbers.conj(),
        numbers.conj().imag,
        torch.arange(60_000).view(200, 300).t(),
        torch.arange(5.0),
        torch.empty(0, 3).t(),
        torch.tensor(3 + 4j).conj(),
        *(torch.arange(n * 12.0).view(n, 12).t() for n in (3, 40, 2)),
        torch.arange(40.0).to(torch.bfloat16)[::3],
    ]
    found = []
    for each in tensors:
        element = element_type(each.dtype)
        assert element is not None
        found.append(Leaf(each, element, tuple(each.shape)))
    return [*found, bytes_leaf(b"abc"), bytes_leaf(np.arange(7.0))]


def joined(pieces: list[memoryview]) -> bytes:
    return b"".join(pieces)


@pytest.mark.parametrize("block_bytes", [512, 10_000, 16 << 20])
def test_pieces_are_the_bytes_in_order_also_where_all_are_kept(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaves, "_BLOCK_BYTES", block_bytes)
    expected = joined([piece for leaf in many_leaves() for piece in leaf.buffers()])
    assert joined(list(pieces_of(many_leaves()))) == expected
    changed = many_leaves()
    assert isinstance(changed[2].source, torch.Tensor)
    changed[2].source[7, 5] += 1
    assert joined(list(pieces_of(changed))) != expected


def test_blocks_are_copied_before_they_are_used() -> None:
    made = many_leaves()[2:4]
    assert isinstance(made[0].source, torch.Tensor)
    expected = joined(list(pieces_of(made)))
    pieces = pieces_of(made)
    first = next(pieces)
    made[0].source.zero_()
    assert joined([first, *pieces]) == expected


def test_the_parts_of_a_block_have_at_most_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaves, "_BLOCK_BYTES", 1000)
    blocks = list(leaves._blocks_of([torch.arange(700.0).view(7, 100).t(), torch.ones(30).t()]))
    sizes = [[part.nbytes for part in block] for block in blocks]
    assert all(0 < sum(each) <= 1000 for each in sizes)
    assert sum(map(sum, sizes)) == 2800 + 120
    assert sizes[-1] == [840, 120]  # two tensors share a block


def test_a_copy_that_is_interrupted_raises_the_error() -> None:
    copies = leaves.TensorCopies()
    with pytest.raises(KeyboardInterrupt), copies.launching():
        raise KeyboardInterrupt
