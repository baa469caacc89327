"""A signal asks the run to leave: it saves at a step boundary, and the same command continues."""

from __future__ import annotations

import gc
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import ConfigurationError, Preempted, RankDisagreementError
from resumekit.run.due_saves import RequestExchange, Requests
from resumekit.run.preemption import LeaveSignals

pytestmark = pytest.mark.usefixtures("signal_handlers")

TERM = signal.SIGTERM


class Training:
    """A loop of ten steps that sends itself a signal."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        loader = DataLoader(TensorDataset(torch.randn(20, 2)), batch_size=2, shuffle=True)
        self.loader = loader
        # What a launch counts of itself, and when it gets its signal, is no state of the loop.
        options = {"transient": {"used", "at"}, **options}
        self.checkpointer = Checkpointer(
            directory, model=self.model, optimizer=self.optimizer, **options
        )

    def run(self, *, at: int | None = None, number: int = TERM, accumulate: int = 1) -> int:
        """The micro-batches that this launch used; the signal comes after batch ``at``."""
        used = 0
        for (batch,) in self.checkpointer.batches(self.loader, epochs=1):
            used += 1
            self.model(batch).sum().backward()
            if used == at:
                os.kill(os.getpid(), number)
            if used % accumulate == 0:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.checkpointer.step()
        self.checkpointer.close()
        return used


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_the_run_saves_at_the_boundary_and_leaves(tmp_path: Path, name: str) -> None:
    number = signal.Signals[name]
    with pytest.raises(Preempted) as left:
        Training(tmp_path).run(at=3, number=number)
    assert left.value.code == 128 + number
    assert (left.value.signal_number, left.value.step) == (number, 3)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]
    assert Training(tmp_path).run() == 7


def test_preempted_passes_handlers_of_exceptions() -> None:
    assert not issubclass(Preempted, Exception)


def test_an_accumulation_window_is_finished_first(tmp_path: Path) -> None:
    with pytest.raises(Preempted) as left:
        Training(tmp_path).run(at=3, accumulate=2)
    assert left.value.step == 2
    assert Training(tmp_path).run(accumulate=2) == 6


def test_a_signal_at_the_last_step_finishes_the_run(tmp_path: Path) -> None:
    training = Training(tmp_path)
    assert training.run(at=10) == 10
    assert training.checkpointer.finished is not None


def test_a_step_that_is_saved_anyway_is_saved_once(tmp_path: Path) -> None:
    with pytest.raises(Preempted):
        Training(tmp_path, save_every=3, keep_latest=None).run(at=3)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000003"]


def test_the_signals_are_given_back_at_the_end_and_on_errors(tmp_path: Path) -> None:
    before = signal.getsignal(TERM)
    training = Training(tmp_path)
    batches = training.checkpointer.batches(training.loader, epochs=1)
    next(batches)
    assert signal.getsignal(TERM) != before
    training.checkpointer.close()
    assert signal.getsignal(TERM) == before

    failing = Training(tmp_path / "other")

    def fail() -> None:
        with failing.checkpointer as checkpointer:
            next(checkpointer.batches(failing.loader, epochs=1))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert signal.getsignal(TERM) == before


def test_a_finished_run_gives_the_signals_back_without_close(tmp_path: Path) -> None:
    before = signal.getsignal(TERM)
    training = Training(tmp_path)
    for _ in training.checkpointer.batches(training.loader, epochs=1):
        training.checkpointer.step()
    assert signal.getsignal(TERM) == before


def test_code_that_handles_a_signal_keeps_it_and_the_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = []
    signal.signal(TERM, lambda number, frame: heard.append(number))
    assert Training(tmp_path).run(at=3) == 10
    assert heard == [TERM]
    assert "SIGTERM: handled by other code" in capsys.readouterr().err


def test_a_loop_in_another_thread_takes_no_signal_and_logs_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(TERM)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(Training(tmp_path).run).result() == 10
    assert signal.getsignal(TERM) == before
    assert "SIGINT: the loop is outside of the main thread" in capsys.readouterr().err


def test_no_signal_is_taken_that_was_not_asked_for(tmp_path: Path) -> None:
    before = signal.getsignal(TERM)
    training = Training(tmp_path, leave_on=("SIGUSR1",))
    next(training.checkpointer.batches(training.loader, epochs=1))
    assert signal.getsignal(TERM) == before
    assert signal.getsignal(signal.SIGUSR1) not in (signal.SIG_DFL, None)
    training.checkpointer.close()


def test_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"leave_on: 'SIGKILL'.*SIGTERM"):
        Training(tmp_path, leave_on=("SIGKILL",))


def test_a_second_interrupt_from_the_keyboard_interrupts() -> None:
    signals = LeaveSignals(["SIGINT"])
    signals.install()
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.received == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    signals.restore()


def test_a_run_that_was_abandoned_does_not_keep_the_signals(tmp_path: Path) -> None:
    first = Training(tmp_path / "first")
    next(first.checkpointer.batches(first.loader, epochs=1))
    with pytest.raises(Preempted):
        Training(tmp_path / "second").run(at=3)
    assert signal.getsignal(TERM) == signal.SIG_DFL


def test_a_run_inside_another_one_gives_the_signals_back_to_it(tmp_path: Path) -> None:
    outer, inner = Training(tmp_path / "outer"), Training(tmp_path / "inner")

    def train() -> None:
        for (batch,) in outer.checkpointer.batches(outer.loader, epochs=1):
            outer.model(batch).sum().backward()
            outer.optimizer.step()
            outer.checkpointer.step()
            if outer.checkpointer.progress.step == 3:
                assert inner.run() == 10
                assert signal.getsignal(TERM) != signal.SIG_DFL  # which would end the tests
                os.kill(os.getpid(), TERM)

    with pytest.raises(Preempted) as left:
        train()
    assert left.value.step == 3
    assert signal.getsignal(TERM) == signal.SIG_DFL


def test_a_child_keeps_the_handler_that_replaced_a_run_s() -> None:
    signals = LeaveSignals(["SIGUSR1"])
    signals.install()
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    signals.restore()
    assert os.waitstatus_to_exitcode(status) == 7


def test_a_loop_that_was_abandoned_does_not_keep_the_workers(tmp_path: Path) -> None:
    """Nothing of a run refers to itself, so nothing waits for the garbage collector."""

    def abandon() -> None:
        training = Training(tmp_path)
        loader = DataLoader(training.loader.dataset, num_workers=1)
        next(training.checkpointer.batches(loader, epochs=1))
        assert len(active_children()) == 1

    gc.collect()
    gc.disable()
    try:
        abandon()
        assert active_children() == []
    finally:
        gc.enable()


def test_a_forked_child_ends_on_sigterm() -> None:
    signals = LeaveSignals(["SIGTERM", "SIGUSR1"])
    signals.install()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR1)  # meant for its parent
        os.kill(os.getpid(), TERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    signals.restore()
    assert os.waitstatus_to_exitcode(status) == -TERM


def test_a_handler_that_others_restore_after_the_end_does_what_was_done_before() -> None:
    over = LeaveSignals(["SIGINT"])
    over.install()
    former = signal.getsignal(signal.SIGINT)
    over.restore()
    signal.signal(signal.SIGINT, former)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not over.received

    signal.signal(signal.SIGINT, former)
    another = LeaveSignals(["SIGINT"])
    assert another.install() == []
    another.restore()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class OtherRank:
    """Stands for a world of two ranks, of which the other one has the same requests.

    Args:
        ahead: how many steps the other rank is ahead.
    """

    world_size, rank = 2, 0

    def __init__(self, ahead: int = 0) -> None:
        self.ahead = ahead
        self.sent: list[list[int]] = []

    def start_max(self, values: Any) -> Any:
        self.sent.append(list(values))
        *requests, step, negated = values
        return lambda: [*requests, step + self.ahead, negated]


def test_ranks_at_different_steps_are_refused_with_both() -> None:
    exchange = RequestExchange(OtherRank(ahead=1))  # type: ignore[arg-type]
    exchange.send(Requests(), 4)
    with pytest.raises(RankDisagreementError, match=r"rank 0 has done 4 steps .all ranks: 4 to 5."):
        exchange.receive(Requests())


def test_a_failure_that_all_ranks_know_of_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, other = Training(tmp_path).checkpointer._loop.saves, OtherRank()
    saves._requests = RequestExchange(other)  # type: ignore[arg-type]
    monkeypatch.setattr(type(saves._run.in_flight), "has_failed", True)
    assert [saves.exchange(step).failed for step in (1, 2, 3)] == [0, 1, 0]
    assert [failed for _, _, _, failed, *_ in other.sent] == [1, 0, 1]


def test_a_timer_that_all_ranks_know_of_is_not_requested_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, other, now = Training(tmp_path, save_every="1h", keep_latest=None), OtherRank(), [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("resumekit.cadence.time", clock)
    training.checkpointer._loop.saves._cadence.restart()  # by this clock
    training.checkpointer._loop.saves._requests = RequestExchange(other)  # type: ignore[arg-type]
    for step, (batch,) in enumerate(training.checkpointer.batches(training.loader, epochs=1)):
        training.model(batch).sum().backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        now[0] += 3600.0 * (step == 2)
        training.checkpointer.step()
    training.checkpointer.close()
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-00000004", "step-00000010"]
    assert [save for _, save, *_ in other.sent] == [0, 0, 1, 0, 0, 0, 0, 0, 0]
