"""What a killed run was fed is what the uninterrupted one was fed, by every kind of loader.

The ledger that is compared is the training function's own: for each step, as it was last executed,
the epoch, the sample indices, the rank, and a digest of the numbers that went into the model. The
library's trace is not asked.

Every kind of loader meets every number of workers, and every number of workers every two of
augmentation and kill point; ``--full-matrix`` runs them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ledger_workloads import (
    LOADERS,
    LOOPS,
    NUM_EPOCHS,
    NUM_SAMPLES,
    NUM_STEPS,
    STEPS_PER_EPOCH,
    train,
)
from preloads import TORCH

from resumekit.storage.store import Store
from resumekit.testing import Cell, KillPoint, Kit, Run

# Where it is killed: what was saved is then 3 batches of epoch 0, 2 of epoch 1, a whole epoch, and
# 3 and 5 batches of epoch 1. Two workers are in the middle of a turn, or at its start.
STEP, CHECKPOINT = KillPoint.step, KillPoint.checkpoint
KILLS = {
    "in epoch 0": (STEP(4),),
    "in epoch 1": (STEP(STEPS_PER_EPOCH + 3),),
    "on the boundary": (CHECKPOINT(STEPS_PER_EPOCH),),
    "twice in one epoch": (STEP(STEPS_PER_EPOCH + 4), STEP(STEPS_PER_EPOCH + 6)),
}
MOST_DONE_AGAIN = 2  # two loaders in turn are saved at every other step
KINDS = (*LOADERS, *LOOPS)
WORKERS = (0, 2)
AUGMENTATIONS = ("none", "random", "numpy", "torch")
FACTORS = ("kind", "workers", "augmentation", "kill")

# Workers that do not begin as a copy of this process import torch first: seconds for each.
SLOW_KINDS = ('multiprocessing_context="spawn"', 'multiprocessing_context="forkserver"')
SLOW_CELLS = (("numpy", "in epoch 0"), ("torch", "in epoch 1"))

TWO_RANKS = ("DistributedSampler", "DistributedResumableSampler")

PRELOAD = TORCH


# ---------------------------------------------------------------- the ledger


class Fed(NamedTuple):
    """What one execution of a step was fed with."""

    epoch: int
    indices: tuple[int, ...]
    digest: str


class Ledger:
    """What all launches of a run wrote down."""

    def __init__(self, run: Run) -> None:
        self.launches: dict[tuple[int, int], list[int]] = {}  # the steps of each rank and launch
        self.last: dict[tuple[int, int], Fed] = {}  # by rank and step, the last execution
        for rank in range(run.cell.world_size):
            path = run.directory / "training" / f"ledger-{rank}.jsonl"
            for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
                steps = self.launches.setdefault((line["rank"], line["launch"]), [])
                if "step" in line:
                    steps.append(line["step"])
                    fed = Fed(line["epoch"], tuple(line["indices"]), line["digest"])
                    self.last[line["rank"], line["step"]] = fed

    def require_resumed(self) -> None:
        """Fails unless every launch but the first resumed where the one before it was saved."""
        done: dict[int, int] = {}
        for (rank, launch), steps in sorted(self.launches.items()):
            assert steps == list(range(steps[0], steps[-1] + 1))
            before = done.get(rank, 0)
            assert (steps[0] > 1) == (launch > 0)
            assert before - MOST_DONE_AGAIN < steps[0] <= before + 1
            done[rank] = steps[-1]
        assert set(done.values()) == {NUM_STEPS}


def resumed(kit: Kit, cell: Cell) -> tuple[Ledger, Ledger]:
    """What the uninterrupted run was fed, and what the killed one was."""
    reference, run = kit.run_uninterrupted(cell), kit.run_killed(cell)
    assert not run.failure
    assert not run.missed_kills
    expected, found = Ledger(reference), Ledger(run)
    assert len(expected.launches) == cell.world_size
    found.require_resumed()
    return expected, found


def cell(
    kind: str, *, workers: int, augmentation: str, kill: str, world_size: int = 1, **options: Any
) -> Cell:
    whole = {"kind": kind, "workers": workers, "augmentation": augmentation, **options}
    return Cell(train, whole, world_size, KILLS[kill])


# ---------------------------------------------------------------- what is reported


class Row(NamedTuple):
    """A row of the page on data."""

    word: dict[int, str]  # by the number of workers; without those that the kind cannot have
    reason: str
    remedy: str


def rows_of_the_page() -> dict[str, Row]:
    page = (Path(__file__).resolve().parents[2] / "docs" / "explanation" / "data.md").read_text(
        encoding="utf-8"
    )
    section = page.split("## Loader by loader", 1)[1].split("\n## ", 1)[0]
    lines = [line.strip("| ") for line in section.splitlines() if line[:1] == "|"]
    rows = {}
    for line in lines[2:]:
        kind, without, with_workers, reason, remedy = line.replace("`", "").split(" | ")
        words = dict(zip(WORKERS, (without, with_workers), strict=True))
        word = {workers: word for workers, word in words.items() if word != "-"}
        rows[kind] = Row(word, reason, remedy)
    return rows


ROWS = rows_of_the_page()


def reported(run: Run) -> tuple[str, str]:
    """How exactly the last checkpoint holds the position in the data, and why not."""
    store = Store(run.directory / "training" / "run")
    line = store.open_step(store.step_names()[0]).manifest.capture["data"]
    return line["fidelity"], line["reason"]


# ---------------------------------------------------------------- the matrix


def cells(*, full: bool) -> Iterator[dict[str, Any]]:
    rest = list(product(AUGMENTATIONS, KILLS))
    cells_left = {workers: cycle(rest) for workers in WORKERS}
    for kind, row in ROWS.items():
        for workers in row.word:
            if kind in SLOW_KINDS:
                these = list(SLOW_CELLS if full else SLOW_CELLS[: SLOW_KINDS.index(kind)])
            else:
                these = rest if full else [next(cells_left[workers])]
            for augmentation, kill in these:
                yield dict(zip(FACTORS, (kind, workers, augmentation, kill), strict=True))


def cells_of_two_ranks(*, full: bool) -> Iterator[dict[str, Any]]:
    for number, factors in enumerate(product(TWO_RANKS, WORKERS, ["torch"], KILLS)):
        if full or number % 5 == 0:  # a diagonal: each value of each factor
            yield dict(zip(FACTORS, factors, strict=True))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = bool(metafunc.config.getoption("--full-matrix"))
    chosen = {"fed": list(cells(full=full)), "ranks": list(cells_of_two_ranks(full=full))}
    for name, these in chosen.items():
        if name in metafunc.fixturenames:
            ids = [", ".join(str(value) for value in each.values()) for each in these]
            metafunc.parametrize(name, these, ids=ids)


def test_every_kind_of_loader_is_on_the_page() -> None:
    assert tuple(ROWS) == KINDS


@pytest.mark.full
def test_every_kind_of_loader_is_fed_as_if_nobody_had_killed_it(
    kit: Kit, fed: dict[str, Any]
) -> None:
    each = cell(**fed)
    row = ROWS[fed["kind"]]
    expected, found = resumed(kit, each)
    word, reason = reported(kit.run_uninterrupted(each))
    assert word == row.word[fed["workers"]]
    if word == "exact":
        assert found.last == expected.last
    else:
        assert reason == row.reason


@pytest.mark.full
def test_two_ranks_are_fed_as_if_nobody_had_killed_them(kit: Kit, ranks: dict[str, Any]) -> None:
    expected, found = resumed(kit, cell(**ranks, world_size=2))
    assert found.last == expected.last


# ---------------------------------------------------------------- what is not exact

INEXACT = [
    (kind, workers)
    for kind, row in ROWS.items()
    for workers in row.word
    if row.word[workers] != "exact"
]
REMEDIES: dict[str, dict[str, Any]] = {
    "num_workers=0": {"workers": 0},
    "in_order=True": {"settings": {"in_order": True}},
}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "workers"), INEXACT)
def test_what_is_said_not_to_be_exact_differs_indeed(kit: Kit, kind: str, workers: int) -> None:
    each = cell(kind, workers=workers, augmentation="random", kill="in epoch 0")
    expected, found = resumed(kit, each)
    assert found.last != expected.last


@pytest.mark.full
@pytest.mark.parametrize(("kind", "workers"), INEXACT)
def test_what_the_page_says_to_make_it_exact_does(kit: Kit, kind: str, workers: int) -> None:
    options = {"workers": workers, **REMEDIES[ROWS[kind].remedy]}
    each = cell(kind, augmentation="random", kill="in epoch 0", **options)
    expected, found = resumed(kit, each)
    assert reported(kit.run_uninterrupted(each))[0] == "exact"
    assert found.last == expected.last


# ---------------------------------------------------------------- the check can fail


def test_the_ledger_of_an_uninterrupted_run_has_each_sample_once_an_epoch(kit: Kit) -> None:
    each = cell("shuffle=True", workers=0, augmentation="none", kill="in epoch 1")
    fed = Ledger(kit.run_uninterrupted(each)).last
    orders = [
        [index for one in fed.values() if one.epoch == epoch for index in one.indices]
        for epoch in range(NUM_EPOCHS)
    ]
    assert [sorted(order) for order in orders] == NUM_EPOCHS * [list(range(NUM_SAMPLES))]
    assert orders[0] != orders[1]


@pytest.mark.parametrize("workers", WORKERS)
def test_without_the_position_other_samples_come(kit: Kit, workers: int) -> None:
    each = cell("shuffle=True", workers=workers, augmentation="none", kill="in epoch 1")
    expected = Ledger(kit.run_uninterrupted(each))
    found = Ledger(kit.run_killed(each, inject="data"))
    step = found.launches[0, 1][0]
    assert step > 1
    assert found.last[0, step].indices != expected.last[0, step].indices


@pytest.mark.parametrize("augmentation", AUGMENTATIONS[1:])
def test_without_the_random_state_the_same_samples_are_others(kit: Kit, augmentation: str) -> None:
    each = cell("shuffle=True", workers=0, augmentation=augmentation, kill="in epoch 1")
    expected = Ledger(kit.run_uninterrupted(each))
    found = Ledger(kit.run_killed(each, inject="rng"))
    step = found.launches[0, 1][0]
    assert step > 1
    assert found.last[0, step].indices == expected.last[0, step].indices
    assert found.last[0, step].digest != expected.last[0, step].digest
