"""Every disk that a power cut may leave during a save is recovered from by the real store."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from crashlab.crashes import Renames
from crashlab.explorer import Findings, cases, explore, relaunch
from crashlab.faulty_launches import (
    killed_and_relaunched,
    trained_on_after_a_failed_sync,
    trained_on_after_failing_calls,
)
from crashlab.jobs import Job
from crashlab.large_files import PATH
from crashlab.mutants import dropping
from crashlab.operations import Append, FailedSync, Sync
from crashlab.recording import Recording
from crashlab.scenarios import SCENARIOS, WITH_LINKS, Lab, large_save
from resumekit.storage.directories import StepName
from resumekit.storage.files import FileWriter
from resumekit.storage.io.file_system import LocalFileSystem

# Two ranks have many more instants, so fewer states of each are enough.
LIMITS = {
    (Renames.ATOMIC, 1): 48,
    (Renames.ATOMIC, 2): 20,
    (Renames.BY_TARGET, 1): 8,
    (Renames.BY_TARGET, 2): 3,
    (Renames.SPLIT, 1): 12,
    (Renames.SPLIT, 2): 4,
}
RecordProperty = Callable[[str, object], None]


@pytest.mark.parametrize(
    ("share", "num_expected"),
    [pytest.param(1, 5_000, marks=pytest.mark.full, id="all"), pytest.param(12, 3_500, id="some")],
)
def test_no_crash_state_of_any_scenario_breaks_a_promise(
    share: int, num_expected: int, record_property: RecordProperty
) -> None:
    findings = Findings()
    for (renames, world_size), most in LIMITS.items():
        limit = max(2, most // share)
        for name, scenario in SCENARIOS.items():
            if share > 1 and world_size > 1 and name in WITH_LINKS:
                continue  # each rank links for itself; with two they take minutes
            job = scenario(Lab(world_size=world_size))
            explore(job, limit=limit, renames=renames, findings=findings)
    record_property("power cut during a save", findings.num_states)
    assert not findings.violations, "\n".join(findings.violations[:5])
    assert findings.num_states >= num_expected


@pytest.mark.parametrize("limit", [pytest.param(24, marks=pytest.mark.full), 3])
def test_no_crash_state_of_a_save_in_place_breaks_a_promise(
    limit: int, record_property: RecordProperty
) -> None:
    findings = Findings()
    for world_size, most in ((1, limit), (2, max(2, limit // 3))):
        for name, scenario in SCENARIOS.items():
            if world_size == 1 or name not in WITH_LINKS:
                job = scenario(Lab(world_size=world_size, is_in_place=True))
                explore(job, limit=most, renames=Renames.ATOMIC, findings=findings)
    record_property("power cut during a save in place", findings.num_states)
    assert not findings.violations, "\n".join(findings.violations[:5])
    assert findings.num_states > 3_000


@pytest.mark.full
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_no_crash_state_of_a_save_above_64_mb_breaks_a_promise(
    is_async: bool, monkeypatch: pytest.MonkeyPatch, record_property: RecordProperty
) -> None:
    monkeypatch.undo()  # chunks as large as in a real run
    job = large_save(Lab(), is_async=is_async)
    assert sum(len(call.data) for call in _direct_writes(job)) > 64 << 20
    findings = explore(job, limit=6)
    how = "async" if is_async else "sync"
    record_property(f"power cut during a save above 64 MB, {how}", findings.num_states)
    assert not findings.violations, "\n".join(findings.violations[:5])
    assert findings.num_states > 100


@pytest.mark.full
def test_a_missing_sync_of_a_file_above_64_mb_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    label = "fsync .staging/step-N/optimizer/rank-N.safetensors"
    job = large_save(Lab(wrap=dropping(label)), is_async=False)
    assert explore(job, limit=6, enough=1).violations


@pytest.mark.full
def test_large_writes_are_recorded_as_the_system_calls_that_make_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    job = large_save(Lab(), is_async=False)
    (number,) = {call.file for call in _direct_writes(job)}
    recorded = [
        len(call.data)
        for call in job.recording.operations
        if isinstance(call, Append) and call.file == number
    ]
    file_system = LocalFileSystem()
    made: list[int] = []
    with file_system.observed(made.append):
        writer = FileWriter(file_system, tmp_path / "file", relative="file", writer=0)
        writer.write([memoryview(job.attempted[StepName(2)][PATH])])
        writer.finish()
    assert made == recorded


def _direct_writes(job: Job) -> list[Append]:
    calls = [call for call in job.recording.operations if isinstance(call, Append)]
    return [call for call in calls if call.call.startswith("direct write")]


@pytest.mark.parametrize("num_recoveries", [pytest.param(6, marks=pytest.mark.full), 2])
def test_a_crash_during_the_recovery_from_a_crash_breaks_no_promise(
    num_recoveries: int, record_property: RecordProperty
) -> None:
    findings = Findings()
    for scenario in SCENARIOS.values():
        job = scenario(Lab())
        first = list(cases(job, limit=3, renames=Renames.ATOMIC, seen=set()))
        for promise, state in first[:: max(1, len(first) // num_recoveries)]:
            again = relaunch(job, promise, state)
            again.start()
            loaded = again.load_newest()
            again.save(loaded.name.step + 1 if loaded.name else 1)
            explore(again, limit=3, findings=findings)
    record_property("power cut during a recovery", findings.num_states)
    assert not findings.violations, "\n".join(findings.violations[:5])


@pytest.mark.parametrize("is_full", [False, True], ids=["", "full disk"])
@pytest.mark.parametrize("keep_latest", [1, 2])
@pytest.mark.parametrize("apart", [pytest.param(1, marks=pytest.mark.full), 20])
def test_a_power_cut_after_a_kill_and_a_relaunch_breaks_no_promise(
    keep_latest: int, apart: int, is_full: bool, record_property: RecordProperty
) -> None:
    # What the killed process had not synced is still in the page cache when the next one starts.
    findings = Findings()
    num_calls = 0
    while job := killed_and_relaunched(num_calls, keep_latest=keep_latest, is_full=is_full):
        explore(job, limit=3, findings=findings)
        num_calls += apart
    name = f"keep_latest={keep_latest}{', full disk' if is_full else ''}"
    record_property(f"power cut after a kill and a relaunch, {name}", findings.num_states)
    assert not findings.violations, "\n".join(findings.violations[:5])


def test_a_failed_fsync_is_never_tried_again_and_breaks_no_promise(
    record_property: RecordProperty,
) -> None:
    findings = Findings()
    num_failed = 0
    while (job := trained_on_after_a_failed_sync(num_failed)) is not None:
        num_failed += 1
        calls = job.recording.operations
        (failed,) = (index for index, call in enumerate(calls) if isinstance(call, FailedSync))
        later = [call.file for call in calls[failed:] if isinstance(call, Sync)]
        assert calls[failed].inode not in later, calls[failed].call  # type: ignore[attr-defined]
        explore(job, limit=4, findings=findings)
    record_property("failed fsync", num_failed)
    record_property("power cut after a failed fsync", findings.num_states)
    assert not findings.violations, "\n".join(findings.violations[:5])
    assert num_failed > 15


@pytest.mark.parametrize(
    ("world_size", "keep_latest", "apart"),
    [
        pytest.param(1, 1, 1, marks=pytest.mark.full),
        pytest.param(2, 1, 3, marks=pytest.mark.full),
        pytest.param(1, 2, 1, marks=pytest.mark.full),
        (1, 1, 15),
        (1, 2, 37),  # 148 is the sync after a commit's rename
    ],
)
@pytest.mark.parametrize(
    ("cause", "for_good"),
    [
        pytest.param(errno.EIO, False, id="EIO once"),
        pytest.param(errno.ENOSPC, True, id="ENOSPC for good"),
    ],
)
def test_a_disk_that_fails_during_background_saves_breaks_no_promise(
    world_size: int,
    keep_latest: int,
    apart: int,
    cause: int,
    for_good: bool,
    record_property: RecordProperty,
) -> None:
    findings = Findings()
    numbers = itertools.count(0, apart)
    for number in numbers:
        job = trained_on_after_failing_calls(
            number, cause, for_good=for_good, world_size=world_size, keep_latest=keep_latest
        )
        if job is None:
            break
        explore(job, limit=3, findings=findings)
    how = f"{errno.errorcode[cause]}{' for good' if for_good else ''}"
    name = f"{how}, ranks {world_size}, keep_latest={keep_latest}"
    record_property(f"error at a call of a background save, {name}", len(range(0, number, apart)))
    record_property(f"power cut after an error in a background save, {name}", findings.num_states)
    assert not findings.violations, "\n".join(findings.violations[:5])
    assert number > 100


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_job_that_is_not_crashed_leaves_its_newest_checkpoint(name: str) -> None:
    job = SCENARIOS[name](Lab(world_size=2))
    again = Job(Recording.on(job.recording.disk), 2)
    again.start()
    assert again.load_newest().name == job.promises[-1].newest


def test_recordings_of_one_scenario_have_the_same_states() -> None:
    keys = []
    for _ in range(2):
        job = SCENARIOS["same_step_twice"](Lab())
        found: set[tuple[str, object]] = set()
        list(cases(job, limit=8, renames=Renames.ATOMIC, seen=found))
        keys.append(found)
    assert keys[0] == keys[1]
