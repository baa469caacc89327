"""A run that is killed inside an epoch continues under any other framework, with other names.

The parameters have the names that users of each framework give them, and no option is passed. What
is compared is what the script itself notes: samples, losses, weights and averaged weights.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("deepspeed")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

from framework_matrix_workloads import (
    BATCH_SIZE,
    EPOCHS,
    FRAMEWORKS,
    NUM_SAMPLES,
    SAVE_EVERY,
    train,
)
from preloads import ALL

from resumekit.testing import Cell, KillPoint, Kit, Run

PRELOAD = ALL
STEPS_PER_EPOCH = NUM_SAMPLES // BATCH_SIZE
KILL = 5  # inside the first epoch
SAVED = KILL - KILL % SAVE_EVERY

# Names in the checkpoint begin with these, see the classes of the workloads.
PREFIX = {
    "torch": "",
    "accelerate": "base_model.model.",
    "trainer": "net.",
    "lightning": "model.",
    "deepspeed": "module.",
}

# What a framework's own loop has in a checkpoint: another one does not need it.
LOOP = {
    "torch": [],
    "accelerate": ["callbacks/accelerator", "callbacks/loaders"],
    "trainer": ["callbacks/settings", "callbacks/trainer", "callbacks/trainer_state"],
    "lightning": ["callbacks/ModelCheckpoint-0", "callbacks/lightning"],
    "deepspeed": ["callbacks/deepspeed"],
}
SAVED_NAME = f"step-{SAVED:08}"

# What it logs of it in a run that another framework began.
BEGINS = {
    "torch": [],
    "accelerate": [f"{SAVED_NAME} has no {key}: it starts" for key in LOOP["accelerate"]],
    "trainer": [f"the Trainer counts on from step {SAVED}; its log begins there"],
    "lightning": [
        f"{SAVED_NAME} has no callbacks/ModelCheckpoint-0: it starts",
        f"Lightning's loops go on at batch {SAVED} of epoch 0; averages over this epoch begin",
    ],
    "deepspeed": [f"{SAVED_NAME} has no callbacks/deepspeed: it starts"],
}

# Its sampler orders each epoch by a seed of its own, see docs/explanation/contract.md.
SEEDED = "trainer"


class Step(NamedTuple):
    """What the script noted of a step."""

    samples: list[int]
    loss: str
    weights: str
    average: str


def steps(run: Run) -> list[Step]:
    """The steps of a run that was killed at most once; those of the killed launch up to its save.

    It is not asked for the checkpoint: when saves are made is fixed.
    """
    lines = [json.loads(line) for line in (run.directory / "notes.jsonl").read_text().splitlines()]
    launches: dict[int, list[Step]] = {}
    for launch, *noted in lines:
        launches.setdefault(launch, []).append(Step(*noted))
    *killed, last = launches.values()
    return [*(step for launch in killed for step in launch[:SAVED]), *last]


def changed(kit: Kit, first: str, then: str, *, inject: str | None = None, **options: Any) -> Run:
    """A run that is killed under the first framework and continued under the other."""
    run = kit.new_run(Cell(train, {"framework": first}), inject=inject)
    run = kit.run_again(run, kill=KillPoint.step(KILL))
    assert not run.failure, run.failure
    cell = Cell(train, {"framework": then, **options})
    return kit.run_again(replace(run, cell=cell), kill=None)


def finished(run: Run) -> Run:
    assert not run.failure, run.failure
    assert not run.missed_kills
    return run


def last_log(run: Run) -> str:
    return (run.directory / "launch-00001-rank-00000.log").read_text()


def changes(first: str, then: str) -> list[str]:
    """What a change between two frameworks logs."""
    old, new = PREFIX[first], PREFIX[then]
    if old.endswith(new) or new.endswith(old):
        common = min(old, new, key=len)
        old, new = old.removesuffix(common), new.removesuffix(common)
    not_needed = [f"{SAVED_NAME} has {key}, which belongs to" for key in LOOP[first]]
    return [f"parameter names: {old}* -> {new}*", *not_needed, *BEGINS[then]]


@pytest.fixture(scope="module")
def whole(kit: Kit) -> Any:
    """The steps of an uninterrupted run under a framework."""
    known: dict[str, list[Step]] = {}

    def get(framework: str) -> list[Step]:
        if framework not in known:
            run = kit.run_uninterrupted(Cell(train, {"framework": framework}))
            known[framework] = steps(finished(run))
        return known[framework]

    return get


# Every framework once on either side.
SAMPLE = [
    ("torch", "lightning"),
    ("lightning", "deepspeed"),
    ("deepspeed", "trainer"),
    ("trainer", "accelerate"),
    ("accelerate", "torch"),
]
CELLS = [
    pytest.param(*cell, marks=() if cell in SAMPLE else pytest.mark.full)
    for cell in product(FRAMEWORKS, FRAMEWORKS)
]


@pytest.mark.parametrize(("first", "then"), CELLS)
def test_each_framework_continues_what_another_one_began(
    kit: Kit, whole: Any, first: str, then: str
) -> None:
    run = finished(changed(kit, first, then))
    found, expected = steps(run), whole(first)
    assert len(found) == len(expected) == EPOCHS * STEPS_PER_EPOCH
    assert found[:STEPS_PER_EPOCH] == expected[:STEPS_PER_EPOCH]
    later, known = found[STEPS_PER_EPOCH:], expected[STEPS_PER_EPOCH:]
    if first != then and SEEDED in (first, then):
        used = [sample for step in later for sample in step.samples]
        assert sorted(used) == list(range(NUM_SAMPLES))
        assert used != [sample for step in known for sample in step.samples]
        assert later[0].weights == known[0].weights
    else:
        assert later == known
    log = last_log(run)
    for line in changes(first, then):
        assert log.count(line) == (first != then), line
    assert ("; the next one is that of" in log) == (first != then and SEEDED in (first, then))


def test_a_network_with_another_head_is_refused_and_named(kit: Kit) -> None:
    run = changed(kit, "torch", "lightning", two_heads=True)
    assert "StateMismatchError: model: with * -> model.* most names are equal" in run.failure
    assert "the checkpoint lacks model.second_head.bias, model.second_head.weight" in run.failure


def test_without_its_optimizer_the_change_is_seen_in_the_losses(kit: Kit, whole: Any) -> None:
    run = finished(changed(kit, "torch", "lightning", inject="optimizer"))
    found, expected = steps(run), whole("torch")
    assert found[SAVED] == expected[SAVED]
    assert found[SAVED + 1 : STEPS_PER_EPOCH] != expected[SAVED + 1 : STEPS_PER_EPOCH]
