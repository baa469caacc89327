"""A read that fails once with EIO or ESTALE is tried again; nothing else is, and no write."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resumekit.errors import CheckpointError, SaveError, UnreadableCheckpointError
from resumekit.storage.directories import StepName
from resumekit.storage.store import Store

Save = Callable[..., StepName]
OpenStore = Callable[..., Store]

READS = ("open", "preadv", "scandir", "lstat")


class FailingCalls:
    """The calls of the operating system with these names: the chosen ones fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.num_calls = 0
        self.failing = range(0)
        self.number = errno.EIO
        for name in names:
            monkeypatch.setattr(os, name, self._instead_of(getattr(os, name)))

    def _instead_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            self.num_calls += 1
            if self.num_calls in self.failing:
                raise OSError(self.number, os.strerror(self.number))
            return function(*arguments, **options)

        return call

    def fail(self, calls: range, number: int) -> None:
        """From now on, counts from 1 again."""
        self.num_calls, self.failing, self.number = 0, calls, number


@pytest.fixture
def calls(
    store: Store, save: Save, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[FailingCalls, Callable[[], None]]]:
    """The calls that read a checkpoint, and what reads it whole."""
    save(store, 5)

    def read() -> None:
        store.open_step(StepName(5)).verify()

    yield FailingCalls(monkeypatch, *READS), read
    monkeypatch.undo()


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_one_transient_error_at_any_read_is_not_noticed(
    calls: tuple[FailingCalls, Callable[[], None]], number: int
) -> None:
    failing, read = calls
    read()
    num_calls = failing.num_calls
    assert num_calls > 8
    for call in range(1, num_calls + 1):
        failing.fail(range(call, call + 1), number)
        read()
        assert failing.num_calls > num_calls


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_second_error_counts_and_proves_no_damage(
    calls: tuple[FailingCalls, Callable[[], None]], number: int
) -> None:
    failing, read = calls
    read()
    for call in range(1, failing.num_calls + 1):
        failing.fail(range(call, 1000), number)
        with pytest.raises(UnreadableCheckpointError):
            read()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOMEM])
def test_other_errors_are_not_retried_and_prove_no_damage(
    calls: tuple[FailingCalls, Callable[[], None]], number: int
) -> None:
    failing, read = calls
    read()
    for call in range(1, failing.num_calls + 1):
        failing.fail(range(call, call + 1), number)
        with pytest.raises(UnreadableCheckpointError) as raised:
            read()
        assert raised.value.errno == number


def test_a_stale_descriptor_is_replaced_by_one_of_the_same_path(
    store: Store, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 5)
    stale = set[int]()
    opened, read = os.open, os.preadv

    def open_stale(path: Any, *arguments: Any, **options: Any) -> int:
        descriptor = opened(path, *arguments, **options)
        if path not in seen:
            stale.add(descriptor)
        seen.add(path)
        return descriptor

    def read_stale(descriptor: int, *arguments: Any) -> int:
        if descriptor in stale:
            raise OSError(errno.ESTALE, "stale")
        return read(descriptor, *arguments)

    seen = set[Path]()
    monkeypatch.setattr(os, "open", open_stale)
    monkeypatch.setattr(os, "preadv", read_stale)
    store.open_step(StepName(5)).verify()
    assert len(seen) == 3


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["writev", "fsync", "rename", "mkdir"])
def test_no_write_is_retried(
    store: Store, save: Save, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    failing = FailingCalls(monkeypatch, call)
    failing.fail(range(1, 2), number)
    with pytest.raises(SaveError):
        save(store, 5)
    monkeypatch.undo()
    with pytest.raises(CheckpointError):
        store.open_step(StepName(5))
