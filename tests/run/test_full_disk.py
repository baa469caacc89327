"""A disk or quota that is full costs no checkpoint, whichever file it is noticed at."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from failpoints import WRITE_CALLS, Failpoint, FailpointFileSystem
from small_volumes import empty, ext4, fill, fill_inodes, tmpfs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.attach import trainings
from resumekit.attach.trainings import KnownRuns
from resumekit.errors import (
    ConfigurationError,
    CorruptCheckpointError,
    DirectoryError,
    InsufficientSpaceError,
    Preempted,
)
from resumekit.record import journal
from resumekit.run.saving.background import drain
from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import Free, LocalFileSystem
from resumekit.storage.store import Store

pytestmark = pytest.mark.usefixtures("signal_handlers")

Actions = Mapping[int, Callable[[], object]]

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
            self._left = -1
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


@pytest.fixture(autouse=True)
def messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "resumekit")


class Training:
    """Eight steps with dropout and shuffling, saved at every second one."""

    def __init__(self, directory: Path, *, num_features: int = 5, **options: Any) -> None:
        torch.manual_seed(0)
        self.directory = directory
        self.losses: dict[int, str] = {}
        self.model = nn.Sequential(nn.Linear(num_features, 4), nn.Dropout(0.3), nn.Linear(4, 2))
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

    def train(self, before: Actions | None = None, *, after: Actions | None = None) -> Training:
        """Trains; an action is done before a step, or after it and before its safe point."""
        with self.checkpointer:
            for inputs, labels in self.checkpointer.batches(self.loader, steps=NUM_STEPS):
                step = self.checkpointer.progress.step + 1
                (before or {}).get(step, lambda: None)()
                loss = nn.functional.cross_entropy(self.model(inputs), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses[step] = float(loss.detach()).hex()
                self.checkpointer.step(loss=loss)
                (after or {}).get(step, lambda: None)()
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
@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.full, id="every call"), 11])
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


# ---------------------------------------------------------------- what a policy says and keeps


def test_a_skipped_save_names_the_room_and_the_next_one_is_made(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, on_full="skip")
    training.train({6: lambda: report(disk, Free(1_000, None)), 7: disk.heal})
    assert training.saved() == [2, 4, 8]
    (line,) = warnings_in(caplog)
    assert line.startswith("the save at step 6 failed, training continues: ")
    assert re.search(r"1,000 bytes are free, expected [\d,]{6,} for the checkpoint\.", line)


def report(disk: Disk, room: Free) -> None:
    disk.room = room


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.parametrize("policy", ["raise", "skip", "prune"])
@pytest.mark.parametrize("room", [Free(0, None), Free(10**9, 3)], ids=["bytes", "inodes"])
def test_a_last_save_without_room_is_an_error_that_says_what_is_repeated(
    room: Free, policy: str, tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, on_full=policy)
    with pytest.raises(InsufficientSpaceError):
        training.train({8: lambda: report(disk, room)})
    assert training.saved() == ([6] if policy == "prune" else [2, 4, 6])
    newest = "newest checkpoint: step-00000006, a relaunch repeats 2 steps"
    assert warnings_in(caplog) == [f"the last save failed ({newest}) [RK-841]"]


def test_by_policy_a_last_save_without_room_is_a_warning(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, on_full="skip", on_save_error="warn")
    training.train({2: lambda: report(disk, Free(0, None))})
    assert len(warnings_in(caplog)) == 4
    end = "the save at step 8 failed (newest checkpoint: none, a relaunch repeats 8 steps): "
    assert warnings_in(caplog)[-1].startswith(end)
    assert training.saved() == []


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_signal_on_a_full_disk_ends_as_any_and_says_what_is_repeated(
    is_async: bool, tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(tmp_path, on_full="skip", async_save=is_async)

    def ask() -> None:
        report(disk, Free(0, None))
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted) as left:
        training.train({7: ask})
    assert (left.value.step, training.saved()) == (6, [2, 4, 6])
    (line,) = warnings_in(caplog)
    newest = "newest checkpoint: step-00000006, a relaunch repeats 1 steps"
    assert line.startswith(f"the save at step 7 failed ({newest}): ")


@pytest.mark.parametrize("policy", ["raise", "skip", "prune"])
def test_wait_raises_what_a_background_save_found(policy: str, tmp_path: Path, disk: Disk) -> None:
    training = Training(tmp_path, on_full=policy, async_save=True, save_every=None)
    training.checkpointer.resume()
    disk.fail(12, errno.ENOSPC, once=False)
    training.checkpointer.save()
    with pytest.raises(InsufficientSpaceError, match="No space left"):
        training.checkpointer.wait()
    disk.heal()
    training.checkpointer.close()
    assert (training.saved(), staged_in(tmp_path)) == ([], [])


def test_a_save_in_the_background_that_fails_at_the_end_is_an_error(
    tmp_path: Path, disk: Disk
) -> None:
    training = Training(tmp_path, on_full="skip", async_save=True, save_every=None)
    training.checkpointer.resume()
    disk.fail(12, errno.ENOSPC, once=False)
    training.checkpointer.save()
    with pytest.raises(InsufficientSpaceError, match="No space left"):
        training.checkpointer.close()


def test_a_value_whose_save_was_skipped_is_not_the_best(tmp_path: Path, disk: Disk) -> None:
    training = Training(tmp_path, on_full="skip", save_every=None, best_metric="loss")
    report_loss = training.checkpointer.report

    def reports(loss: float, room: Free | None = None) -> Callable[[], object]:
        def act() -> None:
            report(disk, room)  # type: ignore[arg-type]
            report_loss(loss=loss)

        return act

    training.train(after={2: reports(0.5), 4: reports(0.1, Free(0, None)), 6: reports(0.4)})
    best = training.checkpointer.best()
    assert best is not None
    assert (best.step, best.value, training.saved()) == (6, 0.4, [2, 6, 8])


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_pruning_stops_at_the_best_and_the_newest_and_then_raises(
    is_async: bool, tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(
        tmp_path, on_full="prune", save_every=1, best_metric="loss", async_save=is_async
    )
    losses = {step: lambda: training.checkpointer.report(loss=0.5) for step in (1, 3, 4)}
    losses[2] = lambda: training.checkpointer.report(loss=0.1)

    def fill_up() -> None:
        training.checkpointer.wait()
        report(disk, Free(0, None))

    with pytest.raises(InsufficientSpaceError):
        training.train({6: fill_up}, after=losses)
    assert training.saved() == [2, 5]
    deleted = [each.getMessage() for each in caplog.records if "was deleted" in each.getMessage()]
    why = "was deleted: the disk is full, and on_full='prune'"
    assert deleted == [f"step-0000000{step} {why}" for step in (1, 3, 4)]
    disk.heal()
    assert Training(tmp_path).train().saved()[-1] == NUM_STEPS


def test_a_resumed_run_makes_room_before_its_first_save(
    tmp_path: Path, disk: Disk, undisturbed: dict[int, str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Training(tmp_path).train({6: raise_interrupt})
    assert saved_in(tmp_path) == [2, 4]
    resumed = Training(tmp_path, on_full="prune")
    report(disk, Free(0, None))
    with pytest.raises(InsufficientSpaceError):
        resumed.train()
    assert saved_in(tmp_path) == [4]
    disk.heal()
    again = Training(tmp_path, on_full="prune").train()
    assert again.losses == {step: undisturbed[step] for step in range(5, NUM_STEPS + 1)}


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'raise' or 'skip' or 'prune'"):
        Training(tmp_path, on_full="ignore")


# ---------------------------------------------------------------- files around the checkpoints


def test_a_checkpoint_is_committed_although_the_pointer_cannot_be_written(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def create(path: Path) -> int:
        if path.name.startswith("latest-") and disk.room:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
        return FailpointFileSystem.create(disk, path)

    monkeypatch.setattr(disk, "create", create)
    training = Training(tmp_path)
    training.train({6: lambda: report(disk, Free(10**12, None)), 7: disk.heal})
    assert training.saved() == [2, 4, 6, 8]
    (line,) = warnings_in(caplog)
    assert line.startswith(f"step-00000006 is saved, but not named in {tmp_path}/latest: EDQUOT")
    assert (tmp_path / "latest").read_text() == "step-00000008\n"


def test_a_full_disk_at_the_start_is_a_typed_error_and_changes_nothing(
    tmp_path: Path, disk: Disk
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Training(tmp_path).train({6: raise_interrupt})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    num_refused = 0
    while not _is_started(tmp_path, disk, num_refused + 1):
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        num_refused += 1
    assert num_refused == 4  # the owner record


def _is_started(directory: Path, disk: Disk, number: int) -> bool:
    """Whether a launch starts although the call of this number finds the disk full."""
    disk.fail(number, errno.ENOSPC, once=False)
    training = Training(directory)
    with suppress(DirectoryError):
        training.checkpointer.resume()
        training.checkpointer.close()
        return True
    return False


def test_a_damaged_checkpoint_stays_where_its_reason_cannot_be_written(
    tmp_path: Path, disk: Disk, undisturbed: dict[int, str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Training(tmp_path).train({6: raise_interrupt})
    (tmp_path / "step-00000004/manifest.json").write_text("{}")
    store = Store(tmp_path, file_system=disk)
    store.acquire()
    disk.fail(3, errno.ENOSPC, once=False)  # after the directory, the reason's bytes
    with pytest.raises(DirectoryError, match="ENOSPC"):
        store.quarantine(StepName(4), damage(store))
    disk.heal()
    store.release()
    assert [path.name for path in (tmp_path / "quarantine").iterdir()] == []
    assert Training(tmp_path).train().losses == {s: undisturbed[s] for s in range(3, 9)}


def damage(store: Store) -> CorruptCheckpointError:
    with pytest.raises(CorruptCheckpointError) as caught:
        store.open_step(StepName(4))
    return caught.value


# ---------------------------------------------------------------- volumes that fill up

Volume = tuple[Callable[[Path], AbstractContextManager[Path]], Callable[[Path], None]]
VOLUMES: dict[str, Volume] = {
    "ext4": (partial(ext4, num_bytes=8 << 20), partial(fill, leave_bytes=150_000)),
    "tmpfs": (partial(tmpfs, num_bytes=4 << 20), partial(fill, leave_bytes=150_000)),
    "inodes": (
        partial(tmpfs, num_bytes=16 << 20, num_inodes=100),
        partial(fill_inodes, leave_inodes=5),
    ),
}
NUM_FEATURES = 5_000  # about 240 kB in a checkpoint


@pytest.mark.quick(
    "ext4-*-during a save-async", "tmpfs-prune-before a save-sync", "inodes-*-before a save-sync"
)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("vanishes", [False, True], ids=["before a save", "during a save"])
@pytest.mark.parametrize("policy", ["raise", "skip", "prune"])
@pytest.mark.parametrize("kind", VOLUMES)
def test_a_volume_that_fills_up_costs_no_checkpoint(
    kind: str, policy: str, vanishes: bool, is_async: bool, tmp_path: Path, disk: Disk
) -> None:
    options = {"num_features": NUM_FEATURES, "async_save": is_async}
    whole = Training(tmp_path / "undisturbed", **options).train().losses
    mount, fill_up = VOLUMES[kind]
    with mount(tmp_path / "volume") as volume:
        run = volume / "run"

        def begin() -> None:
            training.checkpointer.wait()
            fill_up(volume)
            if vanishes:  # as with a quota, of which statvfs does not know
                report(disk, Free(10**12, None))

        def end() -> None:
            training.checkpointer._run.in_flight.wait_for_own()
            if policy == "skip":
                empty(volume)

        training = Training(run, on_full=policy, **options)
        if policy == "raise":
            with pytest.raises(InsufficientSpaceError):
                training.train({6: begin, 7: end})
            drain()
            assert saved_in(run) == [2, 4]
        else:
            training.train({6: begin, 7: end})
            assert training.losses == whole
            expected = {"skip": [[2, 4, 8]], "prune": [[6, 8], [7, 8], [8]]}
            assert saved_in(run) in expected[policy]
        assert staged_in(run) == []
        disk.heal()
        newest = saved_in(run)[-1]
        if policy != "skip":
            empty(volume)
        resumed = Training(run, **options).train()
        assert resumed.losses == {step: whole[step] for step in range(newest + 1, NUM_STEPS + 1)}


def test_a_journal_without_room_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(journal.JournalFile, max_bytes=1800)
    monkeypatch.setattr("resumekit.run.journaling.JournalFile", make)
    with tmpfs(tmp_path / "volume", num_bytes=1 << 20) as volume:
        training = Training(volume / "run", save_every=None, on_full="skip", on_save_error="warn")
        training.train({3: partial(fill, volume)})
        assert len(training.losses) == NUM_STEPS
        off, last_save = warnings_in(caplog)
        assert off.startswith("the journal is off: ")
        assert "No space left" in off
        assert last_save.startswith("the save at step 8 failed")
        empty(volume)
        resumed = Training(volume / "run").train()
        assert resumed.losses == training.losses


def test_a_journal_that_cannot_begin_leaves_no_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tmpfs(tmp_path / "volume", num_bytes=1 << 20) as volume:
        training = Training(volume / "run", save_every=None, on_full="skip", on_save_error="warn")
        training.train({1: partial(fill, volume)})
        assert len(training.losses) == NUM_STEPS
        assert warnings_in(caplog)[0].startswith("the journal is off: ")
        assert list((volume / "run").glob("journal/*")) == []


def test_a_list_of_trainings_without_room_is_a_typed_error_and_stays_as_it_was(
    tmp_path: Path,
) -> None:
    with tmpfs(tmp_path / "volume", num_bytes=1 << 20) as volume:
        path = volume / "run/trainings.json"
        KnownRuns(path.parent).begin(trainings.Training("m", "d", {}, {}))
        before = path.read_bytes()
        fill(volume)
        with pytest.raises(DirectoryError, match=r"No space left.*Free space"):
            KnownRuns(path.parent).begin(trainings.Training("m", "d", {}, {}))
        assert (path.read_bytes(), list(path.parent.iterdir())) == (before, [path])
