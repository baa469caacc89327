"""Saves in the background: what they hold, how many there are, and how a failure is raised."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from failpoints import FailpointFileSystem, parse_failpoints
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import ConfigurationError, Preempted, SaveError
from resumekit.record.moments import durable_steps, read_trace
from resumekit.record.trace import TRACE_VARIABLE
from resumekit.run.due_saves import RequestExchange
from resumekit.run.saving.background import drain
from resumekit.run.saving.in_flight import SaveInFlight, SaveJob
from resumekit.run.saving.snapshot import Snapshot
from resumekit.serialization.reading import read_payload
from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.store import Store

pytestmark = pytest.mark.usefixtures("signal_handlers")

THREAD = "resumekit-save"


class Gate(FailpointFileSystem):
    """Lets the background thread create no file before it is opened, and fails by a plan."""

    def __init__(self) -> None:
        super().__init__(LocalFileSystem())
        self.opened = threading.Event()
        self.opened.set()

    def fail(self, text: str) -> None:
        self.counts.clear()
        self._plan = parse_failpoints(text)

    def create(self, path: Path) -> int:
        if threading.current_thread().name == THREAD:
            assert self.opened.wait(30)
        return super().create(path)

    def unlink(self, path: Path) -> None:
        if threading.current_thread().name == THREAD:
            assert self.opened.wait(30)
        super().unlink(path)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr("resumekit.storage.store.LocalFileSystem", lambda: gate)
    yield gate
    gate.fail("")
    gate.opened.set()
    drain()


class Training:
    """A loop of ten steps; the weights after each one are kept.

    Each test drives it by a loop of its own, so no variables of these loops are restored.
    """

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.directory = directory
        self.model = nn.Linear(30, 20)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        data = TensorDataset(torch.arange(600.0).reshape(20, 30) / 600)
        self.loader = DataLoader(data, batch_size=2)
        self.extras = {"notes": [0]}
        self.reached = 0
        self.weights: dict[int, torch.Tensor] = {}
        settings: dict[str, Any] = {
            "async_save": True,
            "keep_latest": None,
            "loop_variables": "off",
            **options,
        }
        self.checkpointer = Checkpointer(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            extras=self.extras,
            **settings,
        )

    def steps(self) -> Iterator[int]:
        """Trains a step, then gives its number: its safe point is not passed yet."""
        for (batch,) in self.checkpointer.batches(self.loader, epochs=1):
            self.model(batch).pow(2).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            step = self.checkpointer.progress.step + 1
            self.extras["notes"][0] = step
            self.weights[step] = self.model.weight.detach().clone()
            self.checkpointer.step()
            yield step

    def train(self, actions: Mapping[int, Callable[[], object]]) -> None:
        """Trains all steps; an action is done after its step, before the safe point."""
        for step in self.steps():
            self.reached = step
            if step in actions:
                actions[step]()

    def saved(self) -> list[int]:
        return sorted(name.step for name in Store(self.directory).step_names())

    def weight_of(self, step: int) -> torch.Tensor:
        reader = Store(self.directory).open_step(StepName(step))
        weight = read_payload(reader, "model", 0, ["model"])["model"]["weight"]
        assert isinstance(weight, torch.Tensor)
        return weight

    def manifest_of(self, step: int) -> dict[str, Any]:
        text = (self.directory / f"step-{step:08d}" / "manifest.json").read_text()
        manifest: dict[str, Any] = json.loads(text)
        return manifest


def staging(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / ".staging").iterdir())


def open_later(gate: Gate, seconds: float = 0.1) -> None:
    threading.Timer(seconds, gate.opened.set).start()


# ---------------------------------------------------------------- what a checkpoint holds


def test_training_continues_while_a_checkpoint_of_its_safe_point_is_written(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training(tmp_path, save_every=3)
    for step in training.steps():
        if step == 3:
            gate.opened.clear()
        elif step == 5:  # the save is two steps old, and everything has changed since
            assert training.saved() == []
            training.checkpointer._run.running.agreed.fingerprint["changed"] = "later"
            gate.opened.set()
            training.checkpointer.wait()
            assert training.saved() == [3]
    training.checkpointer.close()
    assert torch.equal(training.weight_of(3), training.weights[3])
    assert not torch.equal(training.weights[3], training.weights[4])
    manifest = training.manifest_of(3)
    assert manifest["progress"]["step"] == 3
    assert "changed" not in manifest["fingerprint"]
    assert training.saved() == [3, 6, 9, 10]


def test_a_run_that_saves_in_the_background_continues_exactly(tmp_path: Path) -> None:
    whole = Training(tmp_path / "whole")
    list(whole.steps())
    first = Training(tmp_path / "run", save_every=2)
    for step in first.steps():
        if step == 5:
            break
    first.checkpointer.wait()
    del first
    drain()
    second = Training(tmp_path / "run", save_every=2)
    assert list(second.steps())
    second.checkpointer.close()
    assert min(second.weights) == 5
    assert torch.equal(second.weights[10], whole.weights[10])


def test_variables_are_saved_as_they_were_at_the_safe_point(tmp_path: Path, gate: Gate) -> None:
    def train(directory: Path, *, leave_at: int | None = None) -> list[str]:
        training = Training(directory, save_every=3, loop_variables="restore")
        hidden, notes, seen = torch.zeros(20), [0], []
        for (batch,) in training.checkpointer.batches(training.loader, epochs=1):
            step = training.checkpointer.progress.step + 1
            hidden.add_(training.model(batch).detach().mean(0))
            notes[0] += step
            seen.append(f"{step} {notes[0]} {float(hidden.sum()).hex()}")
            training.checkpointer.step()
            if step == 3 and leave_at is not None:
                gate.opened.clear()
            if step == leave_at:  # the save is a step old, and the variables have changed since
                assert training.saved() == []
                break
        gate.opened.set()
        training.checkpointer.close()
        return seen

    whole = train(tmp_path / "whole")
    assert train(tmp_path / "run", leave_at=5) == whole[:5]
    assert train(tmp_path / "run") == whole


def test_outside_a_loop_wait_makes_a_save_durable(tmp_path: Path, gate: Gate) -> None:
    training = Training(tmp_path)
    gate.opened.clear()
    training.checkpointer.save()
    assert training.saved() == []
    open_later(gate)
    training.checkpointer.wait()
    assert training.saved() == [0]
    training.checkpointer.close()


def test_a_list_of_all_objects_does_not_break_the_save_in_flight(
    tmp_path: Path, gate: Gate
) -> None:
    # CPython completes a tuple only while nothing else refers to it; such a list does.
    training = Training(tmp_path)
    gate.opened.clear()
    training.checkpointer.save()
    objects = gc.get_objects()
    gate.opened.set()
    training.checkpointer.wait()
    assert len(objects) > 1_000
    assert training.saved() == [0]
    training.checkpointer.close()


@pytest.mark.parametrize("way", ["best", "close"])
def test_what_needs_the_checkpoint_waits_for_it(tmp_path: Path, gate: Gate, way: str) -> None:
    training = Training(tmp_path, save_every=None, best_metric="loss")
    for step in training.steps():
        if step == 2:
            training.checkpointer.report(loss=1.0)
            gate.opened.clear()
        elif step == 3:
            open_later(gate)
            if way == "close":
                break
            best = training.checkpointer.best()
            assert best is not None
            assert best.step == 2
    training.checkpointer.close()
    assert 2 in training.saved()


def test_the_best_checkpoint_is_given_while_a_worse_one_is_written(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training(tmp_path, save_every=None, best_metric="loss")
    checkpointer = training.checkpointer
    for step in training.steps():
        if step in (2, 4):
            checkpointer.wait()
            checkpointer.report(loss=1.0 + step)
            checkpointer.save()
        if step == 4:
            gate.opened.clear()
        elif step == 5:
            best = checkpointer.best()
            assert best is not None
            assert (best.step, training.saved()) == (2, [2])
            gate.opened.set()
            break
    checkpointer.close()
    assert 4 in training.saved()


def test_a_checkpoint_that_is_being_written_counts_as_the_best_so_far(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training(tmp_path, save_every=None, best_metric="loss")
    run = training.checkpointer._run
    for step in training.steps():
        if step == 2:
            training.checkpointer.report(loss=1.0)
            gate.opened.clear()
        elif step == 3:
            assert run.best_so_far() == (StepName(2), 1.0)
            assert training.saved() == []
            gate.fail("fsync:1=ENOSPC")
            gate.opened.set()
            assert training.checkpointer.best() is None
            break
    with pytest.raises(SaveError):
        training.checkpointer.close()


def test_a_trace_records_when_a_checkpoint_is_durable(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TRACE_VARIABLE, str(tmp_path / "trace"))
    training = Training(tmp_path / "run", save_every=None)
    durable: list[list[int]] = []

    def look() -> None:
        durable.append(durable_steps(read_trace(tmp_path / "trace")[0]))

    def save() -> None:
        gate.opened.clear()
        training.checkpointer.save()

    def finish() -> None:
        open_later(gate)
        training.checkpointer.wait()
        look()

    training.train({2: save, 3: look, 4: finish})
    training.checkpointer.close()
    assert durable == [[], [2]]
    assert durable_steps(read_trace(tmp_path / "trace")[0]) == [2, 10]


# ---------------------------------------------------------------- at most one in flight


def test_a_save_waits_for_the_one_in_flight_before_it_copies(tmp_path: Path, gate: Gate) -> None:
    training = Training(tmp_path, save_every=1)
    for step in training.steps():
        if step == 3:
            training.checkpointer.wait()
            gate.opened.clear()
        elif step == 4:
            open_later(gate)
    training.checkpointer.close()
    assert training.saved() == list(range(1, 11))
    for step in training.saved():
        assert torch.equal(training.weight_of(step), training.weights[step])


def test_saves_by_cadence_are_skipped_on_request_and_counted(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "resumekit")
    training = Training(tmp_path, save_every=1, on_save_in_flight="skip")
    for step in training.steps():
        if step == 2:
            training.checkpointer.wait()
            gate.opened.clear()
        elif step == 6:  # those of 3, 4 and 5 were skipped; this one is explicit, and waits
            training.checkpointer.save()
            open_later(gate)
        elif step in (1, 7, 8, 9):
            training.checkpointer.wait()
    training.checkpointer.close()
    assert training.saved() == [1, 2, 6, 7, 8, 9, 10]
    assert "skipped_saves" not in training.manifest_of(2)["details"]
    assert training.manifest_of(6)["details"]["skipped_saves"] == 3
    lines = [record.getMessage() for record in caplog.records]
    assert sum("was skipped, the one before" in line for line in lines) == 3
    assert sum("3 saves skipped" in line for line in lines) == 1


def test_a_save_is_skipped_while_any_rank_is_busy(tmp_path: Path) -> None:
    training = Training(tmp_path, save_every=2, on_save_in_flight="skip")
    other = SimpleNamespace(world_size=2, rank=0)
    other.start_max = lambda values: lambda: [*values[:2], 1, *values[3:]]  # it is always busy
    training.checkpointer._loop.saves._requests = RequestExchange(other)  # type: ignore[arg-type]
    training.train(dict.fromkeys(range(11), training.checkpointer._run.in_flight.wait_for_own))
    training.checkpointer.close()
    assert training.saved() == [2, 10]


def test_a_timer_that_is_due_during_a_save_stays_due(tmp_path: Path, gate: Gate) -> None:
    training = Training(tmp_path, save_every="0.001s", on_save_in_flight="skip")

    def close_gate() -> None:
        training.checkpointer.wait()
        gate.opened.clear()
        time.sleep(0.002)

    def open_gate() -> None:
        gate.opened.set()
        training.checkpointer.wait()

    waits = dict.fromkeys((5, 6, 7, 8, 9, 10), training.checkpointer.wait)
    training.train({2: close_gate, 4: open_gate, **waits})
    training.checkpointer.close()
    assert 3 not in training.saved()  # step 2 was in flight then
    assert {2, 4} <= set(training.saved())
    assert "skipped_saves" not in training.manifest_of(4)["details"]  # they were delayed


def test_a_synchronous_save_does_not_wait_for_the_removal_of_old_files(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training(tmp_path, async_save=False, save_every=1, keep_latest=1)
    steps = training.steps()
    for _ in range(2):
        next(steps)
    gate.opened.clear()
    next(steps)
    assert training.saved() == [2]
    assert [name for name in staging(tmp_path) if name.startswith("trash-")]
    gate.opened.set()
    next(steps)  # its save waits for the removal: two threads never change a run directory
    training.checkpointer.close()
    assert training.saved() == [4]
    assert staging(tmp_path) == []


# ---------------------------------------------------------------- failures


def test_a_failure_is_raised_at_the_next_safe_point(tmp_path: Path, gate: Gate) -> None:
    training = Training(tmp_path, save_every=2)
    actions = {
        3: training.checkpointer.wait,  # for the save of step 2
        4: lambda: gate.fail("fsync:1=ENOSPC"),
        5: lambda: drain_quietly(training),
    }
    with pytest.raises(SaveError, match="No space left"):
        training.train(actions)
    assert training.reached == 5
    assert training.saved() == [2]
    training.checkpointer.close()
    assert staging(tmp_path) == []


def drain_quietly(training: Training) -> None:
    """Lets the thread end; nothing of its outcome is looked at."""
    training.checkpointer._run.in_flight.wait_for_own()


def test_by_policy_a_failure_is_a_warning_and_training_continues(
    tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path, save_every=2, on_save_error="warn")
    for step in training.steps():
        if step == 3:
            training.checkpointer.wait()
        elif step == 4:
            gate.fail("fsync:1=ENOSPC")
        elif step == 5:
            drain_quietly(training)
    training.checkpointer.close()
    assert training.saved() == [2, 6, 8, 10]
    assert "the save at step 4 failed, training continues" in capsys.readouterr().err


@pytest.mark.parametrize("is_async", [True, False])
def test_a_value_whose_save_failed_is_not_the_best_one(
    tmp_path: Path, gate: Gate, is_async: bool
) -> None:
    options = {"best_metric": "loss", "on_save_error": "warn", "async_save": is_async}
    training = Training(tmp_path, save_every=None, **options)
    losses = {2: 0.6, 4: 0.1, 6: 0.5, 8: 0.55}
    for step in training.steps():
        if step in losses:
            training.checkpointer.wait()
            gate.fail("fsync:1=ENOSPC" if step == 4 else "")
            training.checkpointer.report(loss=losses[step])
        elif step == 5:
            drain_quietly(training)
    training.checkpointer.close()
    best = training.checkpointer.best()
    assert best is not None
    assert (best.step, best.value) == (6, 0.5)
    assert training.saved() == [2, 6, 10]


def test_what_removes_old_files_is_no_part_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_remove = threading.Event()
    monkeypatch.setattr(Store, "empty_trash", lambda _: may_remove.wait(30))
    training = Training(tmp_path, save_every=None)
    training.checkpointer.resume()
    training.checkpointer.save()
    training.checkpointer.wait()  # while nothing can be removed
    assert training.saved() == [0]
    threading.Timer(0.1, may_remove.set).start()
    training.checkpointer.close()
    assert may_remove.is_set()


def test_wait_raises_what_failed_whatever_the_policy(tmp_path: Path, gate: Gate) -> None:
    training = Training(tmp_path, save_every=None, on_save_error="warn")
    training.checkpointer.resume()
    gate.fail("fsync:1=EIO")
    training.checkpointer.save()
    with pytest.raises(SaveError, match="Input/output"):
        training.checkpointer.wait()
    training.checkpointer.wait()
    training.checkpointer.close()
    assert training.saved() == []


# ---------------------------------------------------------------- signals


def send(*names: str) -> Callable[[], None]:
    """Sends these signals to this process."""

    def act() -> None:
        for name in names:
            os.kill(os.getpid(), signal.Signals[name])

    return act


def leave(training: Training, gate: Gate) -> Preempted:
    """Saves step 2 in the background and gets SIGTERM in the next step; a second one is ignored."""

    def save() -> None:
        gate.opened.clear()
        training.checkpointer.save()

    def ask() -> None:
        send("SIGTERM", "SIGTERM")()
        open_later(gate)

    with pytest.raises(Preempted) as left:
        training.train({2: save, 3: ask})
    return left.value


def test_a_signal_completes_the_save_in_flight_and_saves_the_step(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training(tmp_path, save_every=None)
    assert leave(training, gate).step == 3
    assert training.saved() == [2, 3]
    assert torch.equal(training.weight_of(2), training.weights[2])


def test_a_signal_saves_the_step_also_when_the_save_in_flight_fails(
    tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path, save_every=None)

    def save() -> None:
        gate.opened.clear()
        gate.fail("fsync:1=EIO")
        training.checkpointer.save()

    def ask() -> None:
        send("SIGTERM")()
        open_later(gate)

    with pytest.raises(Preempted) as left:
        training.train({2: save, 3: ask})
    assert left.value.step == 3
    assert training.saved() == [3]
    assert "the save at step 2 failed" in capsys.readouterr().err


def test_a_signal_saves_the_step_also_when_the_failure_is_known_by_then(
    tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path, save_every=None)

    def save() -> None:
        gate.fail("fsync:1=EIO")
        training.checkpointer.save()

    def ask() -> None:
        drain()
        send("SIGTERM")()

    with pytest.raises(Preempted) as left:
        training.train({2: save, 3: ask})
    assert (left.value.step, training.saved()) == (3, [3])
    assert "the save at step 2 failed" in capsys.readouterr().err


def test_a_last_save_that_fails_is_not_called_saved(
    tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path, save_every=2, on_save_error="warn")

    def ask() -> None:
        training.checkpointer.wait()
        gate.fail("fsync:1=ENOSPC")
        send("SIGTERM")()

    with pytest.raises(Preempted) as left:
        training.train({3: ask})
    assert (left.value.step, training.saved()) == (2, [2])
    errors = capsys.readouterr().err
    assert "SIGTERM: saved at step 2; the same command continues" in errors
    assert "training continues" not in errors


def test_a_first_save_that_fails_is_not_called_saved(
    tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path, save_every=None, on_save_error="warn")

    def ask() -> None:
        gate.fail("fsync:1=ENOSPC")
        send("SIGTERM")()

    with pytest.raises(Preempted) as left:
        training.train({3: ask})
    assert (left.value.step, training.saved()) == (0, [])
    assert "SIGTERM: nothing is saved; the same command starts fresh" in capsys.readouterr().err


@pytest.mark.parametrize("is_async", [True, False])
def test_a_save_that_fails_unexpectedly_leaves_no_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(
        SaveInFlight if is_async else SaveJob, "copy" if is_async else "write", fail
    )
    training = Training(tmp_path, save_every=2, async_save=is_async)
    with pytest.raises(KeyboardInterrupt):
        training.train({})
    assert staging(tmp_path) == []


def test_the_second_save_is_left_out_when_the_grace_is_too_short(
    tmp_path: Path, gate: Gate, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path, save_every=None, grace_seconds=0.01)
    left = leave(training, gate)
    assert (left.step, left.code) == (2, 128 + signal.SIGTERM)
    assert training.saved() == [2]
    errors = capsys.readouterr().err
    assert "no save at step 3, step 2 is saved" in errors
    assert "grace_seconds=0.01" in errors


def test_without_a_save_in_flight_a_signal_always_saves(tmp_path: Path) -> None:
    training = Training(tmp_path, save_every=None, grace_seconds=0)
    with pytest.raises(Preempted):
        training.train({3: send("SIGTERM")})
    assert training.saved() == [3]


def test_a_second_interrupt_abandons_the_save_in_flight_without_damage(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training(tmp_path, save_every=1)

    def close_gate() -> None:
        training.checkpointer.wait()
        gate.opened.clear()

    with pytest.raises(KeyboardInterrupt), training.checkpointer:
        training.train({2: close_gate, 3: send("SIGINT", "SIGINT")})
    assert training.saved() == [1]  # nobody has waited
    gate.opened.set()
    again = Training(tmp_path, save_every=None)
    assert again.checkpointer.resume().step in (1, 2)
    again.checkpointer.close()
    assert staging(tmp_path) == []


# ---------------------------------------------------------------- memory and options


def test_auto_is_synchronous_where_the_copy_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resumekit")
    monkeypatch.setattr(Snapshot, "fits", lambda *_: False)
    training = Training(tmp_path, save_every=4, async_save="auto")
    for step in training.steps():
        if step == 5:
            assert training.saved() == [4]
    training.checkpointer.close()
    lines = [r.getMessage() for r in caplog.records if "does not fit into memory" in r.getMessage()]
    assert len(lines) == 1


def test_the_size_of_the_copy_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "resumekit")
    training = Training(tmp_path, save_every=2)
    list(training.steps())
    training.checkpointer.close()
    lines = [r.getMessage() for r in caplog.records if "copy of the state" in r.getMessage()]
    assert len(lines) == 1
    assert "KB on rank 0" in lines[0]


@pytest.mark.parametrize(
    "options",
    [{"async_save": "yes"}, {"on_save_in_flight": "queue"}, {"grace_seconds": -1}],
    ids=str,
)
def test_an_option_without_meaning_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Training(tmp_path, **options)


# ---------------------------------------------------------------- who owns the save


def test_a_run_that_is_dropped_is_still_saved_and_its_directory_is_free_then(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training(tmp_path, save_every=2)
    for step in training.steps():
        if step == 2:
            gate.opened.clear()
        elif step == 3:
            break
    directory = training.directory
    del training
    gc.collect()  # the save in flight keeps the directory, and nothing else
    open_later(gate)
    again = Training(directory)  # as a notebook does whose cell is run again
    assert again.checkpointer.resume().step == 2
    again.checkpointer.close()


def test_an_error_in_the_loop_flushes_the_save_in_flight_and_starts_none(
    tmp_path: Path, gate: Gate
) -> None:
    training = Training(tmp_path, save_every=2)

    def fail() -> None:
        open_later(gate)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), training.checkpointer:
        training.train({2: gate.opened.clear, 4: fail})
    assert training.saved() == [2]


def test_no_thread_of_a_save_is_left_when_it_is_written(tmp_path: Path) -> None:
    training = Training(tmp_path, save_every=2)
    list(training.steps())
    training.checkpointer.close()
    assert THREAD not in {thread.name for thread in threading.enumerate()}


def test_a_forked_child_has_no_save_and_no_lock(tmp_path: Path, gate: Gate) -> None:
    training = Training(tmp_path, save_every=2)
    for step in training.steps():
        if step == 2:
            gate.opened.clear()
        elif step == 3:
            child = os.fork()
            if child == 0:
                drain()  # returns at once: nothing is in flight here
                os._exit(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            gate.opened.set()
            break
    training.checkpointer.close()
    assert training.saved() == [2]
