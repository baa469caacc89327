"""A disk or quota that is full costs no checkpoint, whichever file it is noticed at."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from failpoints import WRITE_CALLS, Failpoint, FailpointFileSystem
from small_volumes import ext4, fill, tmpfs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import (
    ConfigurationError,
    DirectoryError,
    InsufficientSpaceError,
    Preempted,
    SaveError,
)
from resumekit.record import journal
from resumekit.run.saving.background import drain
from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import Free, LocalFileSystem
from resumekit.storage.store import Store

pytestmark = pytest.mark.usefixtures("signal_handlers")

NUM_STEPS = 8
SAVE_EVERY = 2


NEED_ROOM = ("mkdir", "create", "write", "fsync", "link")


class Disk(FailpointFileSystem):
    """A local disk that is full at chosen calls, or reports no room."""

    def __init__(self) -> None:
        super().__init__(LocalFileSystem())
        self.room: Free | None = None
        self._cause = 0
        self._left = -1  # calls until it is full
        self._is_once = False
        self.was_full = False

    def fail(self, number: int, cause: int, *, once: bool) -> None:
        """Fails at the call of this number: once, or until a checkpoint is deleted.

        Args:
            number: from 1; if once, of all calls that change the disk, else of those that need
                room.
            cause: the errno.
            once: whether the next calls succeed.
        """
        self._left, self._cause, self._is_once = number - 1, cause, once
        self.was_full = False

    def heal(self) -> None:
        """There is room from now on."""
        self._left = -1
        self.room = None

    def _next_point(self, call: str, path: Path | None = None) -> Failpoint | None:
        point = super()._next_point(call, path)
        if call == "unlink" and path is not None and "/trash-" in str(path):
            self.heal()
        elif self._left >= 0 and call in (WRITE_CALLS if self._is_once else NEED_ROOM):
            if self._left:
                self._left -= 1
            else:
                self.was_full = True
                self._left = -1 if self._is_once else 0
                raise OSError(self._cause, os.strerror(self._cause), str(path))
        return point

    def free(self, path: Path) -> Free:
        return self.room or super().free(path)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk()
    monkeypatch.setattr("resumekit.storage.store.LocalFileSystem", lambda: disk)
    yield disk
    disk.heal()
    drain()


class Training:
    """Eight steps with dropout and shuffling, saved at every second one."""

    def __init__(self, directory: Path, *, num_features: int = 5, **options: Any) -> None:
        torch.manual_seed(0)
        self.directory = directory
        self.losses: dict[int, str] = {}
        self.model = nn.Sequential(
            nn.Linear(num_features, 4), nn.Dropout(0.3), nn.Linear(4, 2)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        inputs = torch.arange(16.0 * num_features).reshape(16, num_features).div(100).sin()
        self.loader = DataLoader(
            TensorDataset(inputs, torch.arange(16) % 2), batch_size=2, shuffle=True
        )
        settings = {
            "save_every": SAVE_EVERY,
            "keep_latest": None,
            "loop_variables": "off",
            **options,
        }
        self.checkpointer = Checkpointer(
            directory, model=self.model, optimizer=self.optimizer, **settings
        )

    def train(self, before: dict[int, Callable[[], object]] | None = None) -> Training:
        """Trains; an action is done before a step, after the safe point of the one before it."""
        with self.checkpointer:
            for inputs, labels in self.checkpointer.batches(self.loader, steps=NUM_STEPS):
                step = self.checkpointer.progress.step + 1
                (before or {}).get(step, lambda: None)()
                loss = nn.functional.cross_entropy(self.model(inputs), labels)
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.losses[step] = float(loss.detach()).hex()
                self.checkpointer.step(loss=loss)
        return self

    def saved(self) -> list[int]:
        """The steps of the checkpoints, of which all are whole."""
        return saved_in(self.directory)


def saved_in(directory: Path) -> list[int]:
    store = Store(directory)
    names = sorted(store.step_names())
    for name in names:
        store.open_step(name).verify()
    return [name.step for name in names]


def staged_in(directory: Path) -> list[str]:
    return [path.name for path in (directory / ".staging").iterdir()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return Training(tmp_path_factory.mktemp("undisturbed")).train().losses


@pytest.mark.parametrize("cause", ["ENOSPC once", "EDQUOT until there is room"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("policy", ["raise", "skip", "prune"])
@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.full, id="every call"), 5])
def test_a_full_disk_at_any_call_costs_at_most_the_save_under_way(
    policy: str,
    is_async: bool,
    cause: str,
    apart: int,
    tmp_path: Path,
    disk: Disk,
    undisturbed: dict[int, str],
) -> None:
    outcomes: Counter[str] = Counter()
    for number in itertools.count(1, apart):
        directory = tmp_path / f"{number}"
        outcome = _one_save_fails(directory, number, cause, policy, is_async, disk)
        if outcome is None:
            break
        outcomes[outcome] += 1
        disk.heal()
        assert staged_in(directory) == [], number
        before = saved_in(directory)
        assert len(before) >= 2, (number, before)
        resumed = Training(directory, async_save=is_async).train()
        assert resumed.losses.items() <= undisturbed.items()
        assert sorted(resumed.losses) == [*range(before[-1] + 1, NUM_STEPS + 1)], number
        assert resumed.saved()[-1] == NUM_STEPS
    assert outcomes.total() > 20 / apart
    wanted = {"raise": "an error", "skip": "a skipped save", "prune": "a deleted checkpoint"}
    assert outcomes[wanted[policy]] > 0.5 * outcomes.total(), outcomes


def _one_save_fails(
    directory: Path, number: int, cause: str, policy: str, is_async: bool, disk: Disk
) -> str | None:
    """What came of the save of step 6, whose call of this number fails; None without one."""
    training = Training(directory, async_save=is_async, on_full=policy)

    def begin() -> None:
        training.checkpointer.wait()
        error, *rest = cause.split()
        disk.fail(number, getattr(errno, error), once=rest == ["once"])

    def end() -> None:
        training.checkpointer._run.in_flight.wait_for_own()
        disk.heal()

    try:
        training.train({6: begin, 7: end})
    except InsufficientSpaceError:
        assert policy == "raise"
        drain()
        return "an error"
    if not disk.was_full:
        return None
    assert sorted(training.losses) == [*range(1, NUM_STEPS + 1)]
    saved = training.saved()
    if 2 not in saved:
        assert {4, 8} < set(saved)
        assert 6 in saved or (is_async and 7 in saved)
        return "a deleted checkpoint"
    return "no harm" if saved == [2, 4, 6, 8] else "a skipped save"
