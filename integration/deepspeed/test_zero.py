"""A ZeRO run continues in another stage, on other ranks and without DeepSpeed, bit for bit."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from preloads import DEEPSPEED

pytest.importorskip("deepspeed")

from zero_workloads import take_over

from resumekit.testing import Cell, Kit

PRELOAD = DEEPSPEED

# For each launch the stage, None for none, and the ranks.
Chain = tuple[tuple[int | None, int], ...]
CHAINS: dict[str, tuple[Chain, dict[str, Any]]] = {
    "fewer and more ranks": (((2, 2), (2, 1), (2, 2)), {}),
    "every stage": (((1, 2), (3, 2), (0, 2), (2, 3), (3, 1), (0, 1), (3, 3)), {"tied": True}),
    "plain PyTorch": (((1, 2), (None, 1), (3, 2), (None, 1), (2, 2)), {"frozen": True}),
    "bf16": (((1, 2), (3, 3), (None, 1), (0, 2), (2, 2), (0, 1)), {"precision": "bf16"}),
    "fp16": (((1, 2), (0, 1), (3, 3), (0, 2), (2, 2)), {"precision": "fp16"}),
    "bf16, partly frozen": (
        ((3, 2), (2, 3), (1, 1), (3, 1)),
        {"precision": "bf16", "frozen": True, "tied": True},
    ),
}


def launched(kit: Kit, chain: Chain, **options: Any) -> list[dict[str, Any]]:
    """What each launch of a run noted."""
    run = None
    for seed, (stage, num_ranks) in enumerate(chain):
        cell = Cell(take_over, {"stage": stage, "seed": seed, **options}, num_ranks)
        run = kit.new_run(cell) if run is None else replace(run, cell=cell)
        run = kit.run_again(run)
        assert not run.failure, f"{cell}: {run.failure}"
    assert run is not None
    return [json.loads(line) for line in (run.directory / "notes.jsonl").read_text().splitlines()]


@pytest.mark.quick("fewer and more ranks")
@pytest.mark.parametrize("name", CHAINS)
def test_another_stage_and_other_ranks_take_the_same_bits_over(kit: Kit, name: str) -> None:
    chain, options = CHAINS[name]
    notes = launched(kit, chain, **options)
    assert len(notes) == len(chain)
    for before, after in itertools.pairwise(notes):
        where = f"{before['launch']} -> {after['launch']}"
        assert after["resumed"], where
        assert after["found"] == before["saved"], where
        assert after["saved"] != before["saved"], where
    assert notes[-1]["saved"]["steps"] == str(3 * len(chain))


@pytest.mark.quick("2-model")
@pytest.mark.parametrize(("stage", "component"), [(2, "model"), (3, "optimizer")])
def test_a_component_left_out_is_seen_in_the_bits(kit: Kit, stage: int, component: str) -> None:
    run = kit.run_again(kit.new_run(Cell(take_over, {"stage": 1}, 2)))
    options = {"stage": stage, "seed": 1, "exclude": component}
    run = kit.run_again(replace(run, cell=Cell(take_over, options, 2)))
    assert not run.failure, run.failure
    lines = (run.directory / "notes.jsonl").read_text().splitlines()
    before, after = (json.loads(line) for line in lines)
    weights = {name for name in before["saved"] if name.endswith(("weight", "bias"))}
    same = {name for name in before["saved"] if after["found"].get(name) == before["saved"][name]}
    assert same == (weights if component == "optimizer" else before["saved"].keys() - weights)


def test_parameters_that_counted_their_own_steps_are_refused_and_named(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(take_over, {"stage": None, "unused": True}, 1)))
    assert not run.failure, run.failure
    run = kit.run_again(replace(run, cell=Cell(take_over, {"stage": 1, "unused": True}, 2)))
    assert "StateMismatchError: optimizer: unused.weight" in run.failure
    assert "another count of steps than 'expand.weight' has" in run.failure
