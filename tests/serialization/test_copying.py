"""Large tensors are copied by several threads, which end with the copy, whatever happens."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from resumekit.errors import SaveError
from resumekit.serialization import copying
from resumekit.serialization.copying import ParallelCopies

NUM_TENSORS, NUM_BYTES = 5, (3 << 20) + 11


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A thread for each MiB, and none of them left."""
    monkeypatch.setattr(copying, "_BYTES_PER_THREAD", 1 << 20)
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
    monkeypatch.setattr(copying, "_BYTES_PER_THREAD", NUM_TENSORS * NUM_BYTES)
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
from resumekit.serialization.copying import ParallelCopies
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
