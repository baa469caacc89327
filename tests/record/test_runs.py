"""The journal of real runs: it survives SIGKILL, is compared after a resume, and stops nothing."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import DivergenceError
from resumekit.record.comparison import verdicts
from resumekit.record.journal import BEGIN, END, LOSS, SAVE, SAVED, STEP, Has, find_attempts
from resumekit.record.trace import INJECT_VARIABLE

NEWEST = "step-00000008"


class StopError(Exception):
    """Ends a launch without a save."""


def train(
    directory: Path, *, until: int = 0, seed: int = 0, batch_size: int = 4, **options: Any
) -> Checkpointer:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.2), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    data = TensorDataset(torch.randn(24, 6), torch.arange(24) % 3)
    checkpointer = Checkpointer(
        directory,
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        **{"save_every": 4, **options},
    )
    try:
        with checkpointer:
            loader = DataLoader(data, batch_size, shuffle=True)
            for inputs, labels in checkpointer.batches(loader, epochs=2):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                checkpointer.step(loss=loss)
                if checkpointer.progress.step == until:
                    raise StopError
    except StopError:
        pass
    return checkpointer


def details(run: Path, name: str = NEWEST) -> Any:
    return json.loads((run / name / "manifest.json").read_text())["details"]


@pytest.fixture(autouse=True)
def _a_program_with_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of a test worker has none, and nothing equals what ran in a shell before."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)


@pytest.fixture
def messages(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    logger = logging.getLogger("resumekit")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    monkeypatch.setattr(logger, "propagate", False)
    caplog.set_level(logging.INFO, logger="resumekit")
    return caplog


def test_each_step_has_a_record_with_what_the_loop_gave(tmp_path: Path) -> None:
    train(tmp_path, until=6)
    (attempt,) = find_attempts(tmp_path / "journal")
    records = attempt.records()
    steps = [one for one in records if one.kind == STEP]
    assert [one.step for one in steps] == [1, 2, 3, 4, 5, 6]
    assert [one.samples for one in steps] == [4, 8, 12, 16, 20, 24]
    assert [one.epoch for one in steps] == [0] * 6
    assert all(one.has == Has.IDS | Has.COUNT | Has.RNG | Has.LR | Has.LOSS for one in steps)
    assert len({one.ids for one in steps}) == len({one.loss for one in steps}) == 6
    assert [one.lr for one in steps] == pytest.approx([0.05 * 0.1 ** (n // 3) for n in range(1, 7)])
    assert [one.step for one in records if one.kind == SAVE] == [4]
    assert not [one for one in records if one.kind == LOSS]
    assert attempt.header.resumed_step is None
    assert attempt.header.geometry["train"]["batch_size"] == 4


def test_repeated_steps_are_identical_and_said_to_be_once(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, until=7)
    assert "journal" not in details(tmp_path, "step-00000004")
    train(tmp_path)
    train(tmp_path)  # it has finished
    said = [one.message for one in messages.records if "repeated step" in one.message]
    assert said == ["3 repeated steps: identical"]
    assert details(tmp_path)["journal"] == {"verdict": "identical", "num_steps": 3}
    (found,) = verdicts(tmp_path / "journal")
    assert found.verdict.as_dict() == details(tmp_path)["journal"]


def test_a_kill_after_a_save_leaves_nothing_to_repeat(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, until=4, save_every=3)
    moved = tmp_path.with_name("moved")
    tmp_path.rename(moved)
    (attempt,) = find_attempts(moved / "journal")
    size = attempt.path.stat().st_size
    # Neither step 4, nor its weights, nor the end was recorded.
    attempt.path.write_bytes(attempt.path.read_bytes()[: size - 3 * 96])
    train(moved)
    assert details(moved)["journal"] == {"verdict": "nothing repeated", "num_steps": 0}
    assert not [one for one in messages.records if "repeated step" in one.message]


@pytest.mark.parametrize(
    ("left_out", "kind", "step"),
    [
        ("data", "sample ids", 5),
        ("rng", "random state", 5),
        ("lr_scheduler", "learning rate", 6),
        ("model", "loss", 5),
    ],
)
def test_a_wrong_resume_is_a_warning_with_its_class(
    tmp_path: Path,
    messages: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    left_out: str,
    kind: str,
    step: int,
) -> None:
    train(tmp_path, until=7)
    monkeypatch.setenv(INJECT_VARIABLE, left_out)
    train(tmp_path)
    (said,) = [one for one in messages.records if "attempt 1" in one.message]
    assert said.levelname == "WARNING"
    assert said.message.startswith(f"step {step}: {kind} ")
    assert len(said.message) < 120
    newest = max(path.name for path in tmp_path.glob("step-*"))
    found = details(tmp_path, newest)["journal"]
    assert (found["verdict"], found["num_steps"]) == ("different", step - 4)
    assert found["reason"].startswith(f"step {step}: {kind} ")


def test_a_wrong_resume_ends_the_run_if_it_is_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, until=7)
    monkeypatch.setenv(INJECT_VARIABLE, "rng")
    with pytest.raises(DivergenceError, match=r"step 5: random state: torch .* expected torch"):
        train(tmp_path, on_divergence="raise")
    assert not (tmp_path / NEWEST).exists()


def test_the_error_does_not_come_after_a_right_resume_nor_after_a_change(tmp_path: Path) -> None:
    train(tmp_path, until=7)
    train(tmp_path, until=7, on_divergence="raise")
    train(tmp_path, batch_size=8, allow_changes={"batch_size"}, on_divergence="raise")
    *_, last = verdicts(tmp_path / "journal")
    assert last.verdict.word == "not comparable"
    assert "batch geometry" in last.verdict.reason


def test_after_another_batch_size_the_samples_since_the_checkpoint_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, until=6, save_every=2)
    geometry: Any = {"batch_size": 8, "allow_changes": {"batch_size"}, "save_every": 1}
    copy = tmp_path.with_name("copy")
    for left_out in ("", "data"):
        shutil.copytree(tmp_path, copy)
        shutil.rmtree(copy / "step-00000004")
        if not left_out:
            train(copy, until=4, keep_latest=None, **geometry)
            found = details(copy, "step-00000003")["journal"]
            assert (found["verdict"], found["reason"]) == ("not comparable", "batch geometry")
            assert found["sample_ids"] == "identical for 8 samples"
        else:
            monkeypatch.setenv(INJECT_VARIABLE, left_out)
            with pytest.raises(DivergenceError, match="the 8 samples after step 2: different from"):
                train(copy, until=4, on_divergence="raise", **geometry)
        shutil.rmtree(copy)


def test_a_component_that_is_left_out_on_purpose_makes_steps_not_comparable(
    tmp_path: Path,
) -> None:
    train(tmp_path, until=7)
    train(tmp_path, exclude={"rng"}, on_divergence="raise")
    assert details(tmp_path)["journal"] == {
        "verdict": "not comparable",
        "num_steps": 3,
        "reason": "rng not restored",
    }


def test_a_run_without_a_checkpoint_starts_again_and_is_not_compared(tmp_path: Path) -> None:
    train(tmp_path, until=3)
    train(tmp_path, until=7, seed=1, on_divergence="raise")
    train(tmp_path, seed=1, on_divergence="raise")
    (found,) = verdicts(tmp_path / "journal")
    assert (found.header.number, str(found.verdict)) == (3, "3 repeated steps: identical")


def test_another_thread_count_is_no_difference(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    train(tmp_path, until=7)
    try:
        torch.set_num_threads(threads + 1)
        train(tmp_path, on_divergence="raise")
    finally:
        torch.set_num_threads(threads)
    assert details(tmp_path)["journal"]["verdict"] == "identical"


def test_a_read_only_journal_switches_it_off_with_one_warning(
    tmp_path: Path, messages: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "journal").write_text("a file where the folder should be")
    train(tmp_path)
    warnings = [one.message for one in messages.records if one.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("the journal is off")
    assert (tmp_path / NEWEST).exists()


_FULL = """
import resource, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import test_runs
from resumekit.run import journaling
append = journaling.JournalFile.append
def limited(self, data):
    if self._num_bytes > 2000:  # from here on no file may grow above what this one has
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._num_bytes + 10, resource.RLIM_INFINITY))
    try:
        append(self, data)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
journaling.JournalFile.append = limited
test_runs.train(Path(sys.argv[1]))
"""


def test_a_full_disk_switches_it_off_with_one_warning(tmp_path: Path) -> None:
    tests = str(Path(__file__).parent)
    code = _FULL.format(tests=tests)
    run = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the journal is off") == 1
    assert "File too large" in done.stderr
    assert (run / NEWEST).exists()
    (attempt,) = find_attempts(run / "journal")
    assert 1 <= len(attempt.records()) < 14
    assert attempt.path.stat().st_size % 96  # a torn last record


def test_a_worker_of_a_loader_has_no_handle_that_writes(tmp_path: Path) -> None:
    checkpointer = train(tmp_path, until=3)
    journal = checkpointer._run.journal
    child = os.fork()
    if child == 0:
        journal.step(99, epoch=0, samples=0, is_whole=True, loss=None)
        journal.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (attempt,) = find_attempts(tmp_path / "journal")
    assert [one.step for one in attempt.records() if one.kind == STEP] == [1, 2, 3]


def test_begin_end_and_the_cost_of_each_save_are_recorded_for_reports(tmp_path: Path) -> None:
    before = time.time()
    train(tmp_path, until=9)
    (attempt,) = find_attempts(tmp_path / "journal")
    times = [one for one in attempt.events() if one.kind in (BEGIN, END)]
    assert [(one.kind, one.step) for one in times] == [(BEGIN, 1), (END, 9)]
    costs = [one for one in attempt.events() if one.kind == SAVED]
    assert [cost.step for cost in costs] == [4, 8]
    assert all(0 < cost.blocked_seconds < 60 for cost in costs)
    assert [cost.background_seconds for cost in costs] == [0, 0]
    moments = [each.time for each in (times[0], *costs, times[1])]
    assert [before, *moments] == sorted([before, *moments])


def test_a_background_save_is_recorded_with_the_time_of_the_one_before(tmp_path: Path) -> None:
    train(tmp_path, async_save=True)
    (attempt,) = find_attempts(tmp_path / "journal")
    costs = [one for one in attempt.events() if one.kind == SAVED]
    assert [cost.step for cost in costs] == [4, 8, 12]
    assert [cost.background_seconds > 0 for cost in costs] == [False, True, True]
