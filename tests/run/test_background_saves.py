"""One rank's view of a save in the background: rank 0 waits for parts, gives up, and commits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resumekit.distributed import World
from resumekit.errors import ResumekitError, SaveError
from resumekit.run.due_saves import RequestExchange, Requests
from resumekit.run.saving.background import Work, add_work, drain
from resumekit.run.saving.in_flight import Processes, ProcessId, SaveJob
from resumekit.serialization.writing import Payload
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import Manifest
from resumekit.storage.parts import Part
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

STEP, NUMBER = StepName(5), 3


class TwoRanks:
    """Rank 0 of two, whose rank 1 is played by the test; nothing here is collective."""

    def __init__(self, directory: Path, *, timeout_seconds: float = 30.0) -> None:
        self.store = Store(directory)
        self.store.acquire()
        world = World(0, "node", (0, 1), timeout_seconds=timeout_seconds)
        self.staging = self.store.stage(
            STEP, num_bytes=1000, num_files=4, directories=["state"], with_parts=True
        )
        manifest = Manifest(
            run_id=self.store.run_id,
            attempt=self.store.attempt,
            step=STEP.step,
            revision=0,
            created="2026-01-31T12:00:00+00:00",
            parent=None,
            world_size=2,
            progress={"step": STEP.step, "micro_step": STEP.step},
            finished=None,
            metric=None,
            components=(),
            files=(),
            capture={},
            fingerprint={},
            details={},
        )
        self.job = SaveJob(
            world,
            self.store,
            lambda: self.staging,
            [payload(0)],
            manifest,
            RetentionPolicy(),
            NUMBER,
        )

    def save(self, rank_1: ProcessId | None = None) -> SaveJob:
        others = Processes("node", {} if rank_1 is None else {1: rank_1})
        self.job.start(others)
        return self.job

    def leave_part(self, **changes: Any) -> None:
        """Rank 1 writes its files and leaves its part."""
        files = tuple(payload(1).write(self.staging))
        whole = {"step": STEP.step, "save_number": NUMBER, "rank": 1, "files": files, **changes}
        self.staging.leave_part(Part(self.store.run_id, self.store.attempt, **whole))

    def error_of(self, save: SaveJob) -> ResumekitError | None:
        return save.work.wait()

    @property
    def is_committed(self) -> bool:
        return self.store.step_names() == [STEP]


def payload(rank: int) -> Payload:
    return Payload.of_states("state", rank, {"rng": {"state": torch.full((3,), rank)}})


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_rank_0_commits_when_the_other_has_left_its_part(tmp_path: Path) -> None:
    ranks = TwoRanks(tmp_path)
    save = ranks.save()
    assert save.wait_until_written() is None
    assert not ranks.is_committed
    assert not save.work.is_done
    ranks.leave_part()
    assert ranks.error_of(save) is None
    assert ranks.is_committed
    reader = ranks.store.open_step(STEP)
    reader.verify()
    assert {entry.writer for entry in reader.manifest.files} == {0, 1}


@pytest.mark.parametrize("stale", [{"save_number": NUMBER - 1}, {"step": 4}], ids=str)
def test_a_part_of_another_save_is_not_accepted(tmp_path: Path, stale: dict[str, int]) -> None:
    ranks = TwoRanks(tmp_path, timeout_seconds=0.3)
    save = ranks.save()
    ranks.leave_part(**stale)
    error = ranks.error_of(save)
    assert isinstance(error, SaveError)
    assert "rank 1: has not written its part after 0.3 seconds" in str(error)
    assert not ranks.is_committed
    assert list((tmp_path / ".staging").iterdir()) == []


def test_an_error_of_the_other_rank_is_that_of_the_save(tmp_path: Path) -> None:
    ranks = TwoRanks(tmp_path)
    save = ranks.save()
    ranks.leave_part(files=(), error="its disk is full")
    error = ranks.error_of(save)
    assert isinstance(error, SaveError)
    assert "rank 1: " in str(error)
    assert "its disk is full" in str(error)
    assert not ranks.is_committed
    assert list((tmp_path / ".staging").iterdir()) == []


def test_rank_0_gives_up_at_once_for_a_process_that_has_ended(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    ranks = TwoRanks(tmp_path, timeout_seconds=1000)
    save = ranks.save(_id_of(process))
    assert save.wait_until_written() is None
    time.sleep(0.1)
    assert not save.work.is_done  # it is alive, and may need long
    process.kill()
    error = ranks.error_of(save)
    assert "rank 1: its process ended before its part was written" in str(error)
    assert not ranks.is_committed


def test_a_process_that_ended_after_its_part_is_not_missed(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    ranks = TwoRanks(tmp_path, timeout_seconds=1000)
    save = ranks.save(_id_of(process))
    ranks.leave_part()
    process.kill()
    assert ranks.error_of(save) is None
    assert ranks.is_committed


def test_rank_0_gives_up_on_an_error_that_another_rank_reports(tmp_path: Path) -> None:
    ranks = TwoRanks(tmp_path, timeout_seconds=1000)
    save = ranks.save()
    save.give_up(SaveError("rank 1", found="no staging directory"))
    assert "rank 1: no staging directory" in str(ranks.error_of(save))
    assert not ranks.is_committed


# ---------------------------------------------------------------- processes


def _id_of(process: subprocess.Popen[bytes]) -> ProcessId:
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    return ProcessId("node", process.pid, stat.rpartition(")")[2].split()[19])


def test_a_process_has_ended_when_it_was_killed_or_its_number_is_another_ones(
    process: subprocess.Popen[bytes],
) -> None:
    one = _id_of(process)
    assert not one.has_ended
    assert ProcessId("node", process.pid, "1").has_ended  # the number was given again
    process.send_signal(signal.SIGSTOP)
    assert not one.has_ended  # it may continue
    process.kill()
    deadline = time.monotonic() + 10
    while not one.has_ended:  # a zombie: nobody has waited for it
        assert time.monotonic() < deadline
    process.wait()
    assert one.has_ended
    assert not ProcessId.of_this_process("node").has_ended


def test_a_process_that_was_never_seen_is_never_reported() -> None:
    unseen = ProcessId("node", 2**22 + 1, "1")  # as in another container on this node
    here = ProcessId.of_this_process("elsewhere")
    assert Processes("node", {0: unseen, 1: here}).ended([0, 1, 2]) == []


def test_no_rank_ends_before_the_others_have_seen_it(process: subprocess.Popen[bytes]) -> None:
    def gather(value: ProcessId | None) -> list[Any]:
        if value is None:  # the exchange is over: whatever follows may kill a rank
            process.kill()
            process.wait()
            return [None, None]
        return [value, _id_of(process)]

    world: Any = SimpleNamespace(node="node", ranks=(0, 1), gather=gather)
    assert Processes.of(world).ended([0, 1]) == [1]


# ---------------------------------------------------------------- the thread


def test_work_is_done_in_order_by_one_thread_that_signals_do_not_reach() -> None:
    seen: list[tuple[int, str, bool]] = []

    def act(number: int) -> None:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        seen.append((number, threading.current_thread().name, signal.SIGTERM in blocked))

    works = [Work(f"{number}", lambda number=number: act(number)) for number in range(3)]  # type: ignore[misc]
    for work in works:
        add_work(work)
    drain()
    assert seen == [(number, "resumekit-save", True) for number in range(3)]


def test_the_queue_of_a_forked_child_is_empty() -> None:
    release = threading.Event()

    def act() -> None:
        release.wait(30)

    add_work(Work("long", act))
    child = os.fork()
    if child == 0:
        drain()
        os._exit(0)
    try:
        assert _status_of(child) == 0
    finally:
        release.set()
        drain()


def _status_of(child: int) -> int | None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_an_error_that_nobody_was_given_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    add_work(Work("the save at step 7", lambda: SaveError("disk", found="is full")))
    drain()
    assert "the save at step 7 failed: disk: is full." in caplog.text


# ---------------------------------------------------------------- requests


def test_the_requests_of_a_boundary_are_known_at_it_to_a_rank_that_waits() -> None:
    world = SimpleNamespace(world_size=2, rank=0)
    world.start_max = lambda values: lambda: [*values[:2], 1, *values[3:]]
    exchange = RequestExchange(world)  # type: ignore[arg-type]
    exchange.send(Requests(), 4)
    assert exchange.peek().busy == 1
    assert exchange.receive(Requests()).busy == 1
