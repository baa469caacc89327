"""Saves in the background, in real processes: killed, stopped, ended and forked while they write.

``--full-matrix`` makes 20 kills on one rank and on two.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from async_workloads import fork_workers, leave_by, train_until_killed
from preloads import TORCH

from resumekit.prove import compare
from resumekit.storage.store import Store
from resumekit.testing import Cell, KillPoint, Kit
from resumekit.testing.launchers import ForkServer
from resumekit.testing.task import Task, target_of

PRELOAD = TORCH
NUM_KILLS, ALL_KILLS = 3, 20
TIMEOUT_SECONDS = 90.0


# ---------------------------------------------------------------- killed


@pytest.mark.quick("*")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_kill_at_any_instant_costs_at_most_the_save_in_flight(
    request: pytest.FixtureRequest, kit: Kit, world_size: int
) -> None:
    chance = random.Random(world_size)
    options = {"dropout": True, "save_every": 3, "epochs": 4}
    plain = Cell(train_until_killed, {"options": options}, world_size)
    whole = kit.run_uninterrupted(plain)
    assert not whole.failure, whole.failure
    num_killed = 0
    for trial in range(ALL_KILLS if request.config.getoption("--full-matrix") else NUM_KILLS):
        when = {"after_seconds": chance.uniform(0.0, 0.02), "rank": chance.randrange(world_size)}
        run = kit.run_again(kit.new_run(replace(plain, options={"options": options, **when})))
        num_killed += bool(run.launches[0].failure)
        before = Store(_run_directory(run.directory)).step_names()
        assert before, f"trial {trial}, {when}: no checkpoint"
        for name in before:
            Store(_run_directory(run.directory)).open_step(name).verify()
        run = kit.run_again(replace(run, cell=plain))
        assert not run.launches[-1].failure, f"trial {trial}, {when}: {run.launches[-1].failure}"
        verdict = compare(whole.trace, run.trace, expect_resume=True)
        assert verdict.exact, f"trial {trial}, {when}: {verdict}"
    assert num_killed


def _run_directory(directory: Path) -> Path:
    return directory / "training"


def test_a_component_left_out_is_caught(kit: Kit) -> None:
    options = {"options": {"dropout": True, "save_every": 3}}
    kit.assert_caught(Cell(train_until_killed, options, 1, (KillPoint.step(11),)), "optimizer")


# ---------------------------------------------------------------- ended


def launch(
    server: ForkServer,
    directory: Path,
    target: str,
    *,
    world_size: int = 1,
    timeout_seconds: float = TIMEOUT_SECONDS,
    **options: object,
) -> tuple[list[int], str]:
    """The exit status of each rank, and what they wrote."""
    logs = [directory / f"rank-{rank}.log" for rank in range(world_size)]
    tasks = [Task(target, str(directory / "run"), options, {}, str(log)) for log in logs]
    statuses = server.run(tasks, timeout_seconds)
    if len(statuses) < world_size:
        raise AssertionError(f"it hangs: {[log.read_text()[-2000:] for log in logs]}")
    return [statuses[rank] for rank in range(world_size)], "".join(log.read_text() for log in logs)


@pytest.mark.quick("*-1", "return-2", "exception-2")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["return", "del", "sys.exit", "exception", "close"])
def test_the_save_in_flight_is_completed_however_the_process_ends(
    server: ForkServer, tmp_path: Path, how: str, world_size: int
) -> None:
    statuses, output = launch(server, tmp_path, target_of(leave_by), world_size=world_size, how=how)
    names = [name.step for name in Store(tmp_path / "run").step_names()]
    assert names == [3], f"{statuses}\n{output}"
    Store(tmp_path / "run").open_step(Store(tmp_path / "run").step_names()[0]).verify()
    if world_size == 1:
        assert statuses == [{"sys.exit": 3, "exception": 1}.get(how, 0)], output
    assert "Traceback" not in output or how == "exception", output


# ---------------------------------------------------------------- forked


@pytest.mark.quick("10")
@pytest.mark.parametrize("num_rounds", [10, 200])
def test_workers_that_are_forked_during_a_save_neither_hang_nor_double_the_memory(
    server: ForkServer, tmp_path: Path, num_rounds: int
) -> None:
    statuses, output = launch(
        server,
        tmp_path,
        target_of(fork_workers),
        timeout_seconds=60.0 * num_rounds,  # each round has a limit of its own
        num_rounds=num_rounds,
    )
    assert statuses == [0], output
    (name,) = Store(tmp_path / "run").step_names()
    Store(tmp_path / "run").open_step(name).verify()
