"""Faults in saves of 90 MB and more, whose bytes bypass the page cache."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator

import pytest
from faults_trials import Ended, Trial, Trials

from resumekit.storage.directories import StepName
from resumekit.storage.store import Store
from resumekit.testing import DEFAULT_PRELOAD
from resumekit.testing.launchers import ForkServer

PRELOAD = (*DEFAULT_PRELOAD, "resumekit.adapters.torch")
WIDTH = 800_000  # 96 MB
RecordProperty = Callable[[str, object], None]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def world_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def trials(
    tmp_path_factory: pytest.TempPathFactory, server: ForkServer, world_size: int
) -> Iterator[Trials]:
    directory = tmp_path_factory.mktemp("large")
    yield Trials(directory, server, world_size=world_size, width=WIDTH)
    shutil.rmtree(directory)


def _launch(trial: Trial, world_size: int, failpoints: str, *, is_async: bool) -> Ended:
    return trial.launch(
        failpoints=failpoints, world_size=world_size, width=WIDTH, async_save=is_async
    )


def _num_calls(trials: Trials, world_size: int, *, is_async: bool) -> int:
    """The calls that rank 0 makes in a launch; the bytes of its last save are written directly."""
    trial = trials.new()
    ended = _launch(trial, world_size, "1+=log", is_async=is_async)
    assert ended.succeeded, ended.output
    assert "using direct I/O for large files" in ended.output
    files = Store(trial.run).open_step(StepName(7)).manifest.files
    assert sum(entry.size for entry in files) > 90 << 20
    trial.remove()
    return len(re.findall(r"^failpoint: \d+ ", ended.output, re.MULTILINE))


@pytest.mark.quick("one rank-70-{}+=ENOSPC-async")
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("fault", ["{}=kill", "{}=EIO", "{}+=ENOSPC"])
@pytest.mark.parametrize("apart", [pytest.param(5, marks=pytest.mark.full), 70])
def test_a_fault_in_a_large_save_costs_at_most_this_save(
    apart: int,
    fault: str,
    is_async: bool,
    trials: Trials,
    world_size: int,
    record_property: RecordProperty,
) -> None:
    calls = range(1, _num_calls(trials, world_size, is_async=is_async) + 1, apart)
    for call in calls:
        trial = trials.new()
        _launch(trial, world_size, fault.format(call), is_async=is_async)
        newest = trial.newest_complete()
        assert newest is not None, "the old checkpoint is gone"
        ended = trial.launch(world_size=world_size, width=WIDTH)
        assert ended.succeeded, ended.output
        verdict = trial.judge(trials.reference)
        assert verdict.exact, verdict
        assert verdict.resumes[-1].step == newest.step
        assert list((trial.run / ".staging").iterdir()) == []
        trial.remove()
    how = f"{fault.format('n')}, {'async' if is_async else 'sync'}, ranks {world_size}"
    record_property(f"fault at a call of a save of 96 MB, {how}", len(calls))
