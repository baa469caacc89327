"""Calls of a few threads: each made once, and no thread left behind, whatever happens."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from resumekit.storage.io.pipeline import ThreadedCalls, num_threads

NUM_ITEMS = 50


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("number", [0, 1, 3, 2 * NUM_ITEMS])
def test_every_item_has_one_result_in_order(number: int) -> None:
    seen: list[int] = []

    def square(item: int) -> int:
        seen.append(item)
        return item * item

    calls = ThreadedCalls(square, range(NUM_ITEMS), num_threads=number)
    assert calls.results() == [item * item for item in range(NUM_ITEMS)]
    assert sorted(seen) == list(range(NUM_ITEMS))


def test_the_calls_are_made_while_the_caller_does_something_else() -> None:
    both = threading.Barrier(3)

    def meet(item: int) -> int:
        both.wait(60)
        return threading.get_ident()

    calls = ThreadedCalls(meet, range(2), num_threads=2)
    both.wait(60)
    found = calls.results()
    assert len({*found, threading.get_ident()}) == 3


def test_the_caller_makes_the_calls_that_are_left() -> None:
    num_threads, made, released = 2, list[int](), threading.Event()

    def hold(item: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            released.wait(60)
            return
        made.append(item)
        if len(made) == NUM_ITEMS - num_threads:  # each of the threads holds one item at most
            released.set()

    ThreadedCalls(hold, range(NUM_ITEMS), num_threads=num_threads).results()
    assert len(made) >= NUM_ITEMS - num_threads


def test_without_threads_the_caller_makes_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    found = ThreadedCalls(lambda item: threading.get_ident(), range(9), num_threads=4).results()
    assert set(found) == {threading.get_ident()}


@pytest.mark.parametrize("number", [0, 4])
def test_an_error_of_a_call_is_raised_and_ends_the_others(number: int) -> None:
    made: list[int] = []

    def fail(item: int) -> None:
        made.append(item)
        if item == 3:
            raise ValueError("item 3")

    with pytest.raises(ValueError, match="item 3"):
        ThreadedCalls(fail, range(100_000), num_threads=number).results()
    assert len(made) < 100_000


def test_nothing_is_called_once_they_are_stopped() -> None:
    begun, made = threading.Event(), list[int]()

    def note(item: int) -> None:
        begun.set()
        time.sleep(0.001)
        made.append(item)

    calls = ThreadedCalls(note, range(100_000), num_threads=2)
    begun.wait(60)
    calls.stop()
    assert 0 < len(made) < 100_000


def test_an_interrupt_waits_for_the_threads() -> None:
    calls: ThreadedCalls[int, None]
    started = threading.Event()
    ended: list[int] = []

    def interrupt(item: int) -> None:
        if threading.current_thread() is threading.main_thread():
            started.wait(60)
            raise KeyboardInterrupt
        started.set()
        time.sleep(0.05)
        ended.append(item)

    calls = ThreadedCalls(interrupt, range(1000), num_threads=1)
    with pytest.raises(KeyboardInterrupt):
        calls.results()
    assert ended


@pytest.mark.parametrize(
    ("num_cores", "ranks", "expected"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (16, 1, 4), (16, 8, 2)]
)
def test_a_rank_uses_its_part_of_the_cores(
    num_cores: int, ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = set(range(num_cores))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores, raising=False)
    assert num_threads(ranks) == expected
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    assert num_threads(ranks) == expected
