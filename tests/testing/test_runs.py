"""A first launch that several runs have in common is made once, and changes none of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resumekit.testing import DEFAULT_PRELOAD, Cell, KillPoint, Kit
from resumekit.testing.launchers import Launcher
from resumekit.testing.task import Task

TRAIN = f"{Path(__file__).parent / 'scripts' / 'tiny_training.py'}:train"
PRELOAD = (*DEFAULT_PRELOAD, "torch.utils.data", "resumekit.checkpointer")


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with Kit(tmp_path / "kit", preload=PRELOAD) as kit:
        yield kit


class Counting:
    """A launcher that counts."""

    def __init__(self, launcher: Launcher) -> None:
        self.num_started = 0
        self._launcher = launcher
        self.wait_any, self.close = launcher.wait_any, launcher.close

    def start(self, task: Task) -> int:
        self.num_started += 1
        return self._launcher.start(task)


def cell(*steps: int) -> Cell:
    kills = tuple(map(KillPoint.step, steps))
    return Cell(TRAIN, {"save_every": 3, "count_samples": True}, kills=kills)


def test_runs_that_begin_alike_have_one_first_launch(kit: Kit) -> None:
    launcher = kit._launcher = Counting(kit._launcher)
    kit.assert_exact(cell(8))
    assert launcher.num_started == 3  # one uninterrupted, one killed, one that continues
    kit.assert_caught(cell(8), "model")
    kit.assert_exact(cell(8))
    assert launcher.num_started == 5
    kit.assert_exact(cell(8, 10))
    assert launcher.num_started == 7
    kit.assert_exact(cell(7))
    assert launcher.num_started == 9


def test_what_one_run_did_is_gone_when_the_next_continues(kit: Kit) -> None:
    first = kit.assert_exact(cell(8))
    kit.assert_caught(cell(8), "rng")
    again = kit.assert_exact(cell(8))
    assert (again.resumes[0].launch, again.resumes[0].step) == (1, 6)
    assert again.resumes == first.resumes


def test_a_kill_point_that_is_never_reached_is_reported_each_time(kit: Kit) -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match="never came to the kill point step:99"):
            kit.assert_exact(cell(99))


def test_runs_that_are_handed_out_stay(kit: Kit) -> None:
    verdict, run = kit.judge(cell(8))
    kit.assert_exact(cell(8))
    kit.assert_caught(cell(8), "model")
    assert verdict.exact
    assert (run.trace / "launch-00001").is_dir()
    assert len(run.launches) == 2
