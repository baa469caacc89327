"""Real processes with real faults: the same command, launched again, ends with the same bits.

A run that was killed between two saves is launched with a fault at one call of the save path, and
then once more without. The calls are those of taking the directory over, of a save that lets an
older checkpoint go, and of the last save; each one gets each fault in turn.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults_trials import KILLED, Ended, Trial, Trials
from small_volumes import empty, fill, mounted, tmpfs

from resumekit.storage.directories import StepName
from resumekit.storage.store import Store
from resumekit.testing import DEFAULT_PRELOAD
from resumekit.testing.launchers import ForkServer

PRELOAD = (*DEFAULT_PRELOAD, "resumekit.adapters.torch")  # files are synced here
RecordProperty = Callable[[str, object], None]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Trials:
    return Trials(tmp_path_factory.mktemp("trials"), server)


@pytest.fixture(scope="module")
def all_calls(trials: Trials) -> range:
    """The calls that a launch makes on the write side, from the first to the last."""
    return _calls_until(lambda call: _killed_at(trials, f"{call}=kill") is None)


@pytest.fixture(scope="module")
def calls_of_a_save(trials: Trials) -> range:
    """The same up to the second save of the launch."""

    def is_later(call: int) -> bool:
        trial = _killed_at(trials, f"{call}=kill")
        return trial is None or any((trial.run / ".staging").glob("step-00000007-*/model"))

    return _calls_until(is_later)


def _calls_until(is_later: Callable[[int], bool]) -> range:
    return range(1, 1 + bisect_left(range(1, 1000), True, key=is_later))


def _killed_at(trials: Trials, failpoints: str) -> Trial | None:
    """A trial that was killed at a call; None when it makes no such call."""
    trial = trials.new()
    return trial if trial.launch(failpoints=failpoints).was_killed else None


def _count(record_property: RecordProperty, what: str, number: object) -> None:
    record_property(what, number)
    print(f"{what}: {number}")


def _summed(counts: Counter[str]) -> str:
    return f"{counts.total()}: {dict(counts)}"


def _finish(trials: Trials, trial: Trial, world_size: int = 1) -> None:
    """The same command again: it starts at the newest complete step and ends as if undisturbed."""
    newest = trial.newest_complete()
    ended = trial.launch(world_size=world_size)
    assert ended.succeeded, ended.output
    verdict = trial.judge(trials.reference, expect_resume=newest is not None)
    assert verdict.exact, verdict
    resumed_at = verdict.resumes[-1].step if verdict.resumes else None
    assert resumed_at == (newest.step if newest else None)
    assert list((trial.run / ".staging").iterdir()) == []


def _is_typed(ended: Ended) -> bool:
    kinds = ("SaveError", "InsufficientSpaceError", "DirectoryError", "OwnershipLostError")
    return ended.error.startswith(tuple(f"resumekit.errors.{kind}: " for kind in kinds))


# ---------------------------------------------------------------- one rank


@pytest.mark.full
def test_a_kill_at_every_call_costs_at_most_the_save_under_way(
    trials: Trials, all_calls: range, record_property: RecordProperty
) -> None:
    def kill(call: int) -> StepName | None:
        trial = trials.new()
        assert trial.launch(failpoints=f"{call}=kill").was_killed
        newest = trial.newest_complete()
        _finish(trials, trial)
        return newest

    newest = [kill(call) for call in all_calls]
    assert newest == sorted(newest, key=str)  # a later kill never leaves less
    assert set(newest) == {StepName(3), StepName(6), StepName(7)}
    assert len(all_calls) > 80
    _count(record_property, "SIGKILL at a call of a save, sync", len(all_calls))


@pytest.mark.full
def test_a_kill_in_the_middle_of_every_write_costs_at_most_the_save_under_way(
    trials: Trials, record_property: RecordProperty
) -> None:
    writes = _calls_until(lambda write: _killed_at(trials, f"write:{write}=torn") is None)
    for write in writes:
        trial = _killed_at(trials, f"write:{write}=torn")
        assert trial is not None
        _finish(trials, trial)
    assert len(writes) > 15
    _count(record_property, "SIGKILL within a write of a save", len(writes))


@pytest.mark.full
def test_a_kill_at_any_call_of_a_first_launch_leaves_a_directory_to_start_in(
    trials: Trials, record_property: RecordProperty
) -> None:
    calls = (*range(1, 16), 30, 40, 46, 48, 50)
    for call in calls:
        trial = trials.fresh()
        assert trial.launch(failpoints=f"{call}=kill").was_killed
        _finish(trials, trial)
    _count(record_property, "SIGKILL at a call of a first launch", len(calls))


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "policy"),
    [("{}=EIO", "raise"), ("{}+=ENOSPC", "raise"), ("{}+=EIO", "warn"), ("{}=ENOSPC", "warn")],
)
def test_an_error_at_every_call_is_reported_and_costs_at_most_the_save_under_way(
    fault: str,
    policy: str,
    trials: Trials,
    calls_of_a_save: range,
    record_property: RecordProperty,
) -> None:
    def fail(call: int) -> str:
        trial = trials.new()
        ended = trial.launch(failpoints=fault.format(call), on_save_error=policy)
        assert not ended.was_killed
        newest = trial.newest_complete()
        assert newest is not None, "the old checkpoint is gone"
        how = _reported(ended)
        # Nothing is reported only where nothing is lost: in making the advisory pointer, or a
        # directory that is there.
        assert how != "nothing" or newest == StepName(7), ended.output
        assert policy == "raise" or how != "a failed save", ended.output
        _finish(trials, trial)
        return how

    counts = Counter(map(fail, calls_of_a_save))
    how = f"{fault.format('n')}, sync, on_save_error={policy}"
    _count(record_property, f"error at a call of a save, {how}", _summed(counts))
    assert counts["a failed save" if policy == "raise" else "a warning"] > 20


@pytest.mark.full
@pytest.mark.parametrize("call", ["open", "read_into", "list"])
def test_an_error_at_every_read_proves_no_damage(
    call: str, trials: Trials, record_property: RecordProperty
) -> None:
    kinds = ("DirectoryError", "NoUsableCheckpointError", "SaveError")

    def fail(number: int) -> bool:
        trial = trials.new()
        ended = trial.launch(failpoints=f"{call}:{number}=EIO")
        assert ended.succeeded or ended.error.startswith(
            tuple(f"resumekit.errors.{kind}: " for kind in kinds)
        ), ended.output
        assert not (trial.run / "quarantine").exists()
        _finish(trials, trial)
        return ended.succeeded

    succeeded = list(map(fail, range(1, 25)))
    assert not all(succeeded)
    number = f"{len(succeeded)}: {sum(succeeded)} without harm"
    _count(record_property, f"I/O error of a read in a resume, {call}", number)


def _reported(ended: Ended) -> str:
    """How the user learns that something went wrong."""
    if not ended.succeeded:
        assert _is_typed(ended), ended.output
        return "a failed start" if "DirectoryError: " in ended.error else "a failed save"
    if re.search(r"WARNING: the save at step \d+ failed", ended.output):
        return "a warning"
    return "kept too much" if "could not be removed" in ended.output else "nothing"


# ---------------------------------------------------------------- two ranks

OF_ONE_RANK = "SIGKILL of one of two ranks in a save"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Trials:
    return Trials(tmp_path_factory.mktemp("pairs"), server, world_size=2)


@pytest.mark.quick("0-write:3-3")
@pytest.mark.parametrize(
    ("rank", "call", "newest"),
    [
        (0, "create:2", 3),
        (1, "create:1", 3),
        (0, "write:3", 3),
        (1, "write:1", 3),
        (1, "fsync:1", 3),
        (1, "write:2", 3),
        (1, "fsync:2", 3),
        (0, "rename:2", 3),  # the commit
        (0, "unlink:1", 6),  # retention
    ],
)
def test_a_rank_that_is_killed_in_a_save_takes_no_checkpoint_with_it(
    rank: int, call: str, newest: int, pairs: Trials, record_property: RecordProperty
) -> None:
    trial = pairs.new()
    ended = trial.launch(failpoints=f"{call}=kill", on_rank=rank, world_size=2)
    assert ended.statuses[rank] == KILLED
    assert ended.statuses[1 - rank] != 0  # the other one does not train on alone
    assert trial.newest_complete() == StepName(newest)
    _finish(pairs, trial, world_size=2)
    _count(record_property, f"{OF_ONE_RANK}, sync, rank {rank} at {call}", 1)


@pytest.mark.quick("1-write:1")
@pytest.mark.parametrize(
    ("rank", "call"),
    [
        (0, "create:2"),
        (0, "fsync:2"),
        (0, "write:4"),
        (0, "rename:3"),
        (1, "create:1"),
        (1, "write:1"),
        (1, "fsync:1"),
        (1, "write:3"),  # its part
        (1, "rename:1"),  # the same
    ],
)
def test_a_rank_that_is_killed_in_the_background_takes_no_checkpoint_with_it(
    rank: int, call: str, pairs: Trials, record_property: RecordProperty
) -> None:
    trial = pairs.new()
    ended = trial.launch(failpoints=f"{call}=kill", on_rank=rank, world_size=2, async_save=True)
    assert ended.statuses[rank] == KILLED
    assert ended.statuses[1 - rank] != 0
    assert trial.newest_complete() in (StepName(3), StepName(6))
    _finish(pairs, trial, world_size=2)
    _count(record_property, f"{OF_ONE_RANK}, async, rank {rank} at {call}", 1)


@pytest.mark.full
def test_a_kill_at_every_call_of_a_run_that_saves_in_the_background(
    trials: Trials, record_property: RecordProperty
) -> None:
    def kill(call: int) -> StepName | None:
        trial = trials.new()
        if not trial.launch(failpoints=f"{call}=kill", async_save=True).was_killed:
            return None
        newest = trial.newest_complete()
        assert newest is not None
        _finish(trials, trial)
        return newest

    newest = list(iter(map(kill, itertools.count(1)).__next__, None))
    assert set(newest) == {StepName(3), StepName(6), StepName(7)}
    assert len(newest) > 80
    _count(record_property, "SIGKILL at a call of a save, async", len(newest))


@pytest.mark.full
@pytest.mark.parametrize(("fault", "policy"), [("{}=EIO", "raise"), ("{}+=ENOSPC", "warn")])
def test_an_error_at_every_call_in_the_background_is_reported(
    fault: str,
    policy: str,
    trials: Trials,
    calls_of_a_save: range,
    record_property: RecordProperty,
) -> None:
    def fail(call: int) -> str:
        trial = trials.new()
        ended = trial.launch(failpoints=fault.format(call), on_save_error=policy, async_save=True)
        newest = trial.newest_complete()
        assert newest is not None, "the old checkpoint is gone"
        how = _reported(ended)
        assert how != "nothing" or newest == StepName(7), ended.output
        _finish(trials, trial)
        return how

    counts = Counter(map(fail, calls_of_a_save))
    how = f"{fault.format('n')}, async, on_save_error={policy}"
    _count(record_property, f"error at a call of a save, {how}", _summed(counts))
    assert counts["a failed save" if policy == "raise" else "a warning"] > 20


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_fails_the_save_on_both(rank: int, pairs: Trials) -> None:
    trial = pairs.new()
    ended = trial.launch(failpoints=f"fsync:{2 - rank}=EIO", on_rank=rank, world_size=2)
    assert not any(status == 0 for status in ended.statuses)
    assert f"rank {rank}: " in ended.output
    assert trial.newest_complete() == StepName(3)
    _finish(pairs, trial, world_size=2)


SAVES_EACH_STEP: dict[str, Any] = {"save_every": 1, "keep_latest": 4}


@pytest.fixture(scope="module")
def each_step_saved(pairs: Trials) -> Path:
    """The trace of an undisturbed run that saves each step."""
    trial = pairs.fresh()
    assert trial.launch(world_size=2, **SAVES_EACH_STEP).succeeded
    return trial.trace


@pytest.mark.quick("True-skip-1-write:8")
@pytest.mark.quick("True-prune-1-write:8")
@pytest.mark.parametrize(
    ("rank", "call"),
    [
        (0, "mkdir:20"),
        (0, "create:26"),
        (0, "write:25"),
        (0, "rename:8"),
        (1, "create:8"),
        (1, "write:8"),
        (1, "fsync:8"),
    ],
)
@pytest.mark.parametrize("policy", ["skip", "prune"])
@pytest.mark.parametrize("async_save", [False, True])
def test_all_ranks_train_on_when_the_disk_of_one_is_full(
    async_save: bool, policy: str, rank: int, call: str, pairs: Trials, each_step_saved: Path
) -> None:
    trial = pairs.fresh()
    options = {**SAVES_EACH_STEP, "on_full": policy, "async_save": async_save}
    failpoints = f"{call}=EDQUOT"
    ended = trial.launch(failpoints=failpoints, on_rank=rank, world_size=2, **options)
    assert ended.succeeded, ended.output
    shown = "was deleted: the disk is full" if policy == "prune" else "failed, training continues"
    assert shown in ended.output
    assert trial.newest_complete() == StepName(7)
    assert list((trial.run / ".staging").iterdir()) == []
    verdict = trial.judge(each_step_saved, expect_resume=False)
    assert verdict.exact, verdict


# ---------------------------------------------------------------- real directories


@contextmanager
def _on_a_small_volume(trial: Trial, path: Path) -> Iterator[Path]:
    """A volume of 2 MB with the run directory on it."""
    with tmpfs(path, num_bytes=2 << 20) as volume:
        shutil.move(trial.run, volume / "run")
        trial.run.symlink_to(volume / "run")
        yield volume


@pytest.mark.quick("raise")
@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_full_disk_costs_nothing_that_was_saved(
    policy: str, trials: Trials, tmp_path: Path
) -> None:
    trial = trials.new()
    with _on_a_small_volume(trial, tmp_path / "small") as small:
        fill(small, leave_bytes=40_000)
        before = sorted(trial.run.glob("step-*"))
        ended = trial.launch(on_save_error=policy)
        if policy == "raise":
            assert ended.error.startswith("resumekit.errors.InsufficientSpaceError: ")
            assert "bytes are free" in ended.error
        else:
            assert ended.succeeded
            # The second one is that of the last save.
            assert len(re.findall(r"WARNING: the save at step \d+ failed", ended.output)) == 2
        assert sorted(trial.run.glob("step-*")) == before
        empty(small)
        _finish(trials, trial)


def test_a_volume_that_is_full_on_two_ranks_skips_the_save_on_both(
    pairs: Trials, tmp_path: Path
) -> None:
    trial = pairs.new()
    with _on_a_small_volume(trial, tmp_path / "small") as small:
        fill(small, leave_bytes=40_000)
        ended = trial.launch(on_full="skip", on_save_error="warn", world_size=2, async_save=True)
        assert ended.succeeded, ended.output
        assert len(re.findall(r"WARNING: the save at step \d+ failed", ended.output)) == 2
        assert "newest checkpoint: step-00000003, a relaunch repeats 4 steps" in ended.output
        empty(small)
        _finish(pairs, trial, world_size=2)


@pytest.mark.full
def test_a_disk_that_is_full_to_the_last_byte_is_a_typed_error(
    trials: Trials, tmp_path: Path
) -> None:
    trial = trials.new()
    with _on_a_small_volume(trial, tmp_path / "small") as small:
        fill(small)
        ended = trial.launch()
        assert _is_typed(ended), ended.output
        assert "No space left on device" in ended.error
        empty(small)
        _finish(trials, trial)


def test_a_read_only_directory_is_refused_in_one_clear_line(trials: Trials, tmp_path: Path) -> None:
    trial = trials.new()
    with mounted(tmp_path / "view", "--bind", "-o", "ro", str(trial.run)) as view:
        writable = trial.run.rename(trial.run.with_name("writable"))
        trial.run.symlink_to(view)
        ended = trial.launch()
        assert ended.error.startswith("resumekit.errors.DirectoryError: "), ended.output
        assert "Read-only file system" in ended.error
        trial.run.unlink()
        writable.rename(trial.run)
    _finish(trials, trial)


def test_a_directory_that_a_live_job_owns_is_refused_with_its_name(trials: Trials) -> None:
    trial = trials.new()
    store = Store(trial.run)
    store.acquire()
    try:
        ended = trial.launch()
        assert ended.error.startswith("resumekit.errors.DirectoryInUseError: "), ended.output
        assert f"process {os.getpid()} on " in ended.error
    finally:
        store.release()
    _finish(trials, trial)


def test_a_finished_run_does_nothing_and_changes_no_checkpoint(trials: Trials) -> None:
    trial = trials.new()
    assert trial.launch().succeeded
    before = {path: path.stat().st_mtime_ns for path in trial.run.glob("step-*/**/*")}
    ended = trial.launch()
    assert ended.succeeded
    assert "nothing to do, the run finished at step 7" in ended.output
    assert {path: path.stat().st_mtime_ns for path in trial.run.glob("step-*/**/*")} == before
    assert trial.judge(trials.reference).exact


def test_an_empty_directory_is_started_in(trials: Trials) -> None:
    trial = trials.fresh()
    trial.run.mkdir()
    ended = trial.launch()
    assert ended.succeeded
    assert "starting in" in ended.output
