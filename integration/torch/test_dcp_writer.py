"""``dcp.save`` on several ranks: kills, layouts, errors of a rank, saves in the background."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dcp_training import launch
from dcp_workloads import fail, load, load_others, save, save_in_background
from faults_trials import Ended, Trial
from preloads import TORCH

from resumekit.storage.directories import StepName
from resumekit.testing import Cell, Kit, Run
from resumekit.testing.launchers import ForkServer

PRELOAD = (*TORCH, "resumekit.dcp")
NUM_RANKS = 2

# ---------------------------------------------------------------- kills of a loop


class Loop(Trial):
    """A directory of the loop with what its ranks have noted."""

    training = staticmethod(launch)

    def launch(self, **options: Any) -> Ended:
        return super().launch(world_size=NUM_RANKS, **options)

    def notes(self, event: str) -> list[tuple[int, int, str]]:
        """Rank, step and digest of each line."""
        found = []
        for rank in range(NUM_RANKS):
            path = self.run.parent / f"notes-{rank}.jsonl"
            lines = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
            found += [(rank, x["step"], x["digest"]) for x in lines if x["event"] == event]
        return found


class Loops:
    """The uninterrupted run, and one that has saved step 2."""

    def __init__(self, directory: Path, server: ForkServer) -> None:
        self._directory, self._server = directory, server
        self._numbers = itertools.count()
        reference = self.fresh()
        assert (ended := reference.launch()).succeeded, ended.output
        self.expected = {(rank, step): d for rank, step, d in reference.notes("trained")}
        assert len(self.expected) == NUM_RANKS * 6
        self._begun = self.fresh()
        assert (ended := self._begun.launch(last=2)).succeeded, ended.output
        assert self._begun.newest_complete() == StepName(2)

    def fresh(self) -> Loop:
        return Loop(self._server, self._directory / f"{next(self._numbers):04d}")

    def new(self) -> Loop:
        directory = self._directory / f"{next(self._numbers):04d}"
        shutil.copytree(self._begun.run.parent, directory)
        return Loop(self._server, directory)

    def finish(self, loop: Loop) -> None:
        """The same command again: it loads the newest step, and ends with the same bits."""
        newest = loop.newest_complete()
        assert newest is not None
        num_loads = len(loop.notes("loaded"))
        assert (ended := loop.launch()).succeeded, ended.output
        loaded = loop.notes("loaded")
        assert len(loaded) == num_loads + NUM_RANKS
        assert {step for _, step, _ in loaded[-1:]} == {newest.step}
        for event in ("loaded", "trained"):
            for rank, step, digest in loop.notes(event):
                assert digest == self.expected[rank, step], (event, rank, step)
        assert {(r, s) for r, s, _ in loop.notes("trained")} >= {(0, 6), (1, 6)}
        assert loop.newest_complete() == StepName(6)
        if newest.step < 6:  # what is left is removed by a save
            assert list((loop.run / ".staging").iterdir()) == []


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Loops:
    return Loops(tmp_path_factory.mktemp("loops"), server)


def kill(loops: Loops, failpoints: str, rank: int) -> StepName | None:
    """The newest step after a kill; None where the launch makes no such call."""
    loop = loops.new()
    ended = loop.launch(failpoints=f"{failpoints}=kill", on_rank=rank)
    if not ended.was_killed:
        assert ended.succeeded, ended.output
        return None
    newest = loop.newest_complete()
    loops.finish(loop)
    loop.remove()
    return newest


@pytest.mark.parametrize(
    ("rank", "call", "newest"),
    [
        (0, "mkdir:2", 2),
        (1, "write:1", 2),
        (0, "fsync:3", 2),
        (0, "rename:2", 2),
        (0, "unlink:2", 4),
    ],
)
def test_a_kill_in_a_save_leaves_the_step_before_or_the_new_one(
    loops: Loops, rank: int, call: str, newest: int
) -> None:
    assert kill(loops, call, rank) == StepName(newest)


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_kill_at_every_write_call_leaves_the_step_before_or_the_new_one(
    loops: Loops, rank: int
) -> None:
    found = list(itertools.takewhile(bool, (kill(loops, f"{n}", rank) for n in itertools.count(1))))
    assert len(found) > (80 if rank == 0 else 10)
    assert found == sorted(found, key=lambda name: name.step)  # type: ignore[union-attr]
    assert set(found) == {StepName(step) for step in ((2, 4, 6) if rank == 0 else (2, 4))}


def test_the_stock_writer_leaves_a_mixture(loops: Loops) -> None:
    """The control: rows of step 4 and rows of step 2 in one tensor, without an error."""
    loop = loops.fresh()
    ended = loop.launch(stock=True, killed_at=4)
    assert ended.was_killed, ended.output
    ended = loop.launch(stock=True)
    assert ended.succeeded, ended.output
    loaded = loop.notes("loaded")
    assert {step for _, step, _ in loaded} <= {2, 4}
    assert any(digest != loops.expected[rank, step] for rank, step, digest in loaded)


# ---------------------------------------------------------------- layouts


def launched(kit: Kit, cell: Cell, run: Run | None = None) -> Run:
    run = kit.run_again(replace(run or kit.new_run(cell), cell=cell))
    assert not run.failure, f"{cell}: {run.failure}"
    return run


def notes_of(run: Run) -> list[dict[str, Any]]:
    """What the ranks of the last launch have noted."""
    found: list[dict[str, Any]] = json.loads(
        (run.directory / "loads.jsonl").read_text().splitlines()[-1]
    )
    return found


def assert_loads(kit: Kit, run: Run, layout: str, num_ranks: int) -> None:
    """The layout gets the bits of the model and the optimizer that were saved."""
    expected = notes_of(run)[0]["state"]
    assert {"expand.weight", "expand.weight.exp_avg", "expand.weight.step"} <= expected.keys()
    for notes in notes_of(launched(kit, Cell(load, {"layout": layout}, num_ranks), run)):
        assert notes["failures"] == {}
        assert notes["rates"]
        assert "model..expand.weight." not in notes["changed"]
        found = {name: bits for name, bits in notes["state"].items() if name in expected}
        assert found == expected


SAVED: dict[str, tuple[tuple[str, int], tuple[tuple[str, int], ...]]] = {
    "fsdp": (("fsdp", 2), (("plain", 1), ("fsdp", 3), ("ddp", 2))),
    "fsdp on 3": (("fsdp", 3), (("fsdp", 2), ("hsdp", 4))),
    "plain": (("plain", 1), (("fsdp", 2), ("tp", 2))),
    "ddp": (("ddp", 2), (("fsdp", 2), ("plain", 1))),
    "hsdp": (("hsdp", 4), (("fsdp", 3),)),
    "tp": (("tp", 2), (("fsdp", 3), ("tp", 2))),
    "fsdp x tp": (("fsdp x tp", 4), (("plain", 1),)),
    "fsdp1": (("fsdp1", 2), (("fsdp", 3), ("fsdp1", 2))),
}


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("writer", SAVED)
def test_any_layout_takes_the_bits_that_another_saved(kit: Kit, writer: str) -> None:
    (layout, num_ranks), others = SAVED[writer]
    for other, its_ranks in others:
        run = launched(kit, Cell(save, {"layout": layout}, num_ranks))
        assert_loads(kit, run, other, its_ranks)


def test_values_that_are_no_part_of_the_model_are_stored_once_or_for_each_rank(kit: Kit) -> None:
    run = launched(kit, Cell(save, {"layout": "fsdp"}, 2))
    (step,) = (run.directory / "training").glob("step-*")
    sizes = [path.stat().st_size for path in step.rglob("*.safetensors")]
    assert sum(size >= 280_000 for size in sizes) == 1  # the replicated tensor
    run = launched(kit, Cell(load_others, {}, 3), run)
    of_a_rank = ["rank", [1, 1], [1, 1, 1]]
    expected = {"large": True, "random": True, "pair": [1, [0, 1, 2]], "a.b": [1, 2]}
    assert notes_of(run) == [{**expected, "own": [of_a_rank] * 2}] * 3


# ---------------------------------------------------------------- an error of one rank


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("value", ("UnsupportedValueError", "rank 1: dcp['mine.it'][1]")),
        ("planner", ("RankFailedError", "rank 1: KeyError: 'no data'")),
        ("name", ("RankDisagreementError", "the steps [2, 3]")),
    ],
)
def test_an_error_of_one_rank_fails_the_save_on_all(
    kit: Kit, how: str, words: tuple[str, ...]
) -> None:
    run = launched(kit, Cell(fail, {"how": how}, 2))
    for notes in notes_of(run):
        (error,) = notes["failures"].values()
        assert all(word in error for word in words), error
        assert notes["steps"] == ["step-00000001"]
        assert notes["left"] == []
    assert (run.directory / "training" / "step-00000004").is_dir()


def test_a_save_of_each_rank_by_itself_is_refused(kit: Kit) -> None:
    run = launched(kit, Cell(fail, {"how": "one rank"}, 2))
    for notes in notes_of(run):
        (error,) = notes["failures"].values()
        assert "its parts miss 4 of its elements" in error or "DirectoryInUseError" in error
        assert notes["steps"] == ["step-00000001"]
        assert notes["left"] == []


# ---------------------------------------------------------------- in the background


def test_a_background_save_has_the_bits_of_its_call_while_training_continues(kit: Kit) -> None:
    run = launched(kit, Cell(save_in_background, {"layout": "fsdp"}, 2))
    steps = [path.name for path in (run.directory / "training").glob("step-*")]
    assert steps == ["step-00000009"]
    assert_loads(kit, run, "fsdp", 3)


def test_a_background_save_on_the_group_of_the_training_is_refused(kit: Kit) -> None:
    run = launched(kit, Cell(save_in_background, {"layout": "fsdp", "own_group": False}, 2))
    for notes in notes_of(run):
        assert "async_save: the default process group" in notes["error"]
        assert "dist.new_group" in notes["error"]
    assert list((run.directory / "training").iterdir()) == []


@pytest.mark.full
def test_another_process_saves(kit: Kit) -> None:
    options = {"layout": "fsdp", "in_process": True}
    run = launched(kit, Cell(save_in_background, options, 2))
    assert_loads(kit, run, "plain", 1)
