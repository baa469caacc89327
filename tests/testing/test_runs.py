"""A first launch that several runs have in common is made once, and changes none of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from resumekit.testing import DEFAULT_PRELOAD, Cell, KillPoint, Kit
from resumekit.testing.task import Task

TRAIN = f"{Path(__file__).parent / 'scripts' / 'tiny_training.py'}:train"
PRELOAD = (*DEFAULT_PRELOAD, "torch.utils.data", "resumekit.checkpointer")


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    with Kit(tmp_path_factory.mktemp("kit"), preload=PRELOAD) as kit:
        yield kit


def cell(*steps: int, save_every: int = 3) -> Cell:
    kills = tuple(map(KillPoint.step, steps))
    return Cell(TRAIN, {"save_every": save_every, "count_samples": True}, kills=kills)


def test_runs_that_begin_alike_have_one_first_launch(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Task] = []
    former = kit._server.start

    def start(task: Task) -> int:
        started.append(task)
        return former(task)

    monkeypatch.setattr(kit._server, "start", start)
    kit.assert_exact(cell(8, save_every=2))  # no other test has made a run that begins so
    assert len(started) == 3  # one uninterrupted, one killed, one that continues
    kit.assert_caught(cell(8, save_every=2), "model")
    kit.assert_exact(cell(8, save_every=2))
    assert len(started) == 5
    kit.assert_exact(cell(8, 10, save_every=2))
    assert len(started) == 7
    kit.assert_exact(cell(7, save_every=2))
    assert len(started) == 9


def test_what_one_run_did_is_gone_when_the_next_continues(kit: Kit) -> None:
    first = kit.assert_exact(cell(8))
    kit.assert_caught(cell(8), "rng")
    again = kit.assert_exact(cell(8))
    assert (again.resumes[0].launch, again.resumes[0].step) == (1, 6)
    assert again.resumes == first.resumes


def test_a_kill_point_that_is_never_reached_is_reported_each_time(kit: Kit) -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match="never reached the kill point step:99"):
            kit.assert_exact(cell(99))


def test_runs_that_are_handed_out_stay(kit: Kit) -> None:
    verdict, run = kit.judge(cell(8))
    kit.assert_exact(cell(8))
    kit.assert_caught(cell(8), "model")
    assert verdict.exact
    assert (run.trace / "launch-00001").is_dir()
    assert len(run.launches) == 2
