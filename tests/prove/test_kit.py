"""The conformance kit, on a training function that resumes rightly, or wrongly in a known way."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import resumekit
from resumekit.errors import CommandFailedError, CommandTimeoutError, ConfigurationError
from resumekit.launcher.processes import is_running
from resumekit.record.trace import INJECT_VARIABLE
from resumekit.testing import DEFAULT_PRELOAD, Cell, KillPoint, Kit

TRAIN = f"{Path(__file__).parent / 'scripts' / 'plain_training.py'}:train"
MID_RUN = (KillPoint.step(7), KillPoint.step(13))


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    preload = (*DEFAULT_PRELOAD, "resumekit")
    with Kit(tmp_path_factory.mktemp("kit"), preload=preload, timeout_seconds=30) as kit:
        yield kit


def test_a_right_resume_is_exact_over_several_kills(kit: Kit) -> None:
    verdict = kit.assert_exact(Cell(TRAIN, kills=MID_RUN))
    assert [(one.step, one.num_repeated_steps) for one in verdict.resumes] == [(4, 3), (12, 1)]


@pytest.mark.parametrize("rank", [0, 1, None])
def test_two_ranks_are_started_killed_and_compared(kit: Kit, rank: int | None) -> None:
    cell = Cell(TRAIN, world_size=2, kills=(KillPoint.step(6, rank=rank),))
    verdict = kit.assert_exact(cell)
    assert (verdict.num_ranks, verdict.num_resumes) == (2, 1)


@pytest.mark.parametrize(
    ("wrong", "component", "leaf"),
    [
        ("optimizer", "optimizer", "state[0].momentum_buffer"),
        ("model", "model", "0.weight"),
        ("lr", "lr", "group0"),
        ("rng", "rng", "torch"),
        ("order", "data", "samples"),
        ("step", "lr", "group0"),
        ("everything", "run", ""),
    ],
)
def test_a_wrong_resume_is_caught_and_what_it_forgot_is_named(
    kit: Kit, wrong: str, component: str, leaf: str
) -> None:
    cell = Cell(TRAIN, {"wrong": wrong}, kills=MID_RUN)
    verdict = kit.assert_caught(cell, component, inject=False)
    assert verdict.divergence is not None
    assert verdict.divergence.leaf == leaf


def test_a_wrong_resume_is_not_exact(kit: Kit) -> None:
    with pytest.raises(AssertionError, match=r"DIVERGED: step 5, rank 0: model: 0\.weight"):
        kit.assert_exact(Cell(TRAIN, {"wrong": "model"}, kills=MID_RUN))


def test_an_exact_run_is_not_taken_for_a_caught_one(kit: Kit) -> None:
    with pytest.raises(AssertionError, match="exact without optimizer"):
        kit.assert_caught(Cell(TRAIN, kills=MID_RUN), "optimizer", inject=False)


def test_the_wrong_name_is_not_taken_for_a_caught_defect(kit: Kit) -> None:
    with pytest.raises(AssertionError, match="model was left out, and the verdict is"):
        kit.assert_caught(Cell(TRAIN, {"wrong": "lr"}, kills=MID_RUN), "model", inject=False)


def test_a_kill_point_that_is_never_reached_is_a_failure(kit: Kit) -> None:
    with pytest.raises(AssertionError, match="never reached the kill point step:99"):
        kit.assert_exact(Cell(TRAIN, kills=(KillPoint.step(7), KillPoint.step(99))))


def test_the_uninterrupted_run_is_made_once(kit: Kit) -> None:
    cell = Cell(TRAIN, {"num_epochs": 2}, kills=(KillPoint.step(5),))
    reference = kit.run_uninterrupted(cell)
    kit.assert_exact(cell)
    assert kit.run_uninterrupted(Cell(TRAIN, {"num_epochs": 2})) is reference


def test_a_finished_run_that_is_launched_again_does_nothing(kit: Kit) -> None:
    saves_its_end = {"save_every": 3}
    verdict = kit.assert_finished(Cell(TRAIN, saves_its_end, kills=MID_RUN))
    assert verdict.num_resumes == 2
    assert kit.assert_finished(Cell(TRAIN, saves_its_end, world_size=2)).num_resumes == 0


def test_a_finished_run_that_trains_again_is_a_failure(kit: Kit) -> None:
    # It saves every fourth of its 18 steps, and so never its last one.
    with pytest.raises(AssertionError, match="after its end, rank 0 made a step record of step 17"):
        kit.assert_finished(Cell(TRAIN, kills=MID_RUN))


def test_a_finished_run_that_fails_when_launched_again_is_a_failure(kit: Kit) -> None:
    with pytest.raises(AssertionError, match=r"a launch failed:\n(.|\n)*it is done"):
        kit.assert_finished(Cell(fail_when_done))


def test_an_uninterrupted_run_that_was_launched_again_is_no_reference_any_more(kit: Kit) -> None:
    cell = Cell(train_on)
    reference = kit.run_uninterrupted(cell)
    again = kit.run_again(reference)
    assert (len(reference.launches), len(again.launches)) == (1, 2)
    assert again.trace == reference.trace
    assert kit.run_uninterrupted(cell).trace != reference.trace


def test_a_further_launch_leaves_out_what_the_run_left_out(kit: Kit) -> None:
    run = kit.run_killed(Cell(show_injection), inject="optimizer")
    again = kit.run_again(run)
    shown = (again.directory / "training" / "shown").read_text()
    assert shown == "optimizer optimizer "


@pytest.mark.full  # three imports of torch; the suite of DeepSpeed has one cold start, too
def test_a_cold_start_gives_the_same_verdicts(tmp_path: Path) -> None:
    with Kit(tmp_path, cold=True, timeout_seconds=60) as cold:
        verdict = cold.assert_exact(Cell(walk, kills=(KillPoint.step(5),)))
    assert [resume.step for resume in verdict.resumes] == [4]


def walk(directory: str) -> None:
    """A seeded random walk that saves its position after every second step."""
    saved = Path(directory) / "position.json"
    done, position = json.loads(saved.read_text()) if saved.exists() else (0, 0)
    for step in range(done + 1, 9):
        position += random.Random(step).choice([-1, 1, 5])
        resumekit.trace(step, position=position)
        if step % 2 == 0:
            saved.write_text(json.dumps([step, position]))


def train_on(directory: str) -> None:
    """Trains three steps, and one more in each launch after the third."""
    saved = Path(directory) / "done"
    done = int(saved.read_text()) if saved.exists() else 0
    for step in range(done + 1, max(done + 1, 3) + 1):
        resumekit.trace(step, loss=float(step))
        saved.write_text(str(step))


def fail_when_done(directory: str) -> None:
    done = Path(directory) / "done"
    if done.exists():
        raise RuntimeError("it is done")
    resumekit.trace(1, loss=0.0)
    done.touch()


def show_injection(directory: str) -> None:
    with (Path(directory) / "shown").open("a") as file:
        file.write(f"{os.environ[INJECT_VARIABLE]} ")


def fail(directory: str) -> None:
    raise RuntimeError(f"there is no {Path(directory).name} today")


def sleep(directory: str) -> None:
    time.sleep(60)


def fork_and_die(directory: str) -> None:
    """Leaves two children behind, one of them in a session of its own."""
    for own_session in (True, False):
        pid = os.fork()
        if pid == 0:
            if own_session:
                os.setsid()
            time.sleep(60)
            os._exit(0)
        with (Path(directory) / "ids").open("a") as file:
            file.write(f"{pid}\n")
    time.sleep(60)


def draw(directory: str) -> None:
    """Traces random numbers that nobody has seeded."""
    for step in (1, 2):
        resumekit.trace(step, loss=random.random())


def test_a_function_that_fails_is_a_typed_error_with_its_traceback(kit: Kit) -> None:
    with pytest.raises(CommandFailedError, match="RuntimeError: there is no training today"):
        kit.run_uninterrupted(Cell(fail))


def test_a_function_that_hangs_is_killed_and_reported(tmp_path: Path) -> None:
    with (
        Kit(tmp_path, preload=(), timeout_seconds=0.5) as impatient,
        pytest.raises(CommandTimeoutError, match="took longer than"),
    ):
        impatient.run_uninterrupted(Cell(sleep))


def test_forked_runs_do_not_share_the_random_state_of_the_server(kit: Kit) -> None:
    verdict, _ = kit.judge(Cell(draw))
    assert not verdict.exact
    assert not verdict.is_reproducible


def test_a_kill_takes_the_children_in_other_sessions_with_it(tmp_path: Path) -> None:
    with Kit(tmp_path, preload=(), timeout_seconds=1) as impatient:
        with pytest.raises(CommandTimeoutError):
            impatient.run_uninterrupted(Cell(fork_and_die))
        (ids,) = tmp_path.glob("run-*/training/ids")
        children = [int(line) for line in ids.read_text().split()]
        assert len(children) == 2
        assert not any(is_running(pid) for pid in children)


def fork_and_trace(directory: str) -> None:
    """Leaves a child behind at its kill point."""
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    first = Path(directory) / "first"
    if not first.exists():
        first.write_text(str(child))
    resumekit.trace(1, loss=0.0)
    os.kill(child, 9)
    os.waitpid(child, 0)


def test_children_that_outlive_a_kill_point_are_killed(kit: Kit) -> None:
    run = kit.run_killed(Cell(fork_and_trace, kills=(KillPoint.step(1),)))
    assert [launch.was_killed for launch in run.launches] == [True, False]
    assert not is_running(int((run.directory / "training" / "first").read_text()))


def test_a_nested_function_is_refused(kit: Kit) -> None:
    def inner(directory: str) -> None:
        raise AssertionError(directory)

    with pytest.raises(ConfigurationError, match="top level"):
        kit.run_uninterrupted(Cell(inner))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_closing_the_kit_leaves_no_process(tmp_path: Path) -> None:
    kit = Kit(tmp_path, preload=())
    pid = kit._server._process.pid
    assert is_running(pid)
    kit.close()
    assert not is_running(pid)
