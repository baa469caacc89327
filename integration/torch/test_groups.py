"""State of groups of ranks (pipeline stages, nodes): killed, resumed, and cut differently."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from group_workloads import share_data, train_on_nodes
from pipeline_workloads import take_over, train
from preloads import TORCH

from resumekit.testing import Cell, KillPoint, Kit

PRELOAD = TORCH

# Another number of micro-batches or of ranks adds up in another order; see test_sharded.py.
LOSS_TOLERANCE = 2e-6


PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 stages": (2, {"style": "alone"}),
    "2 stages with rates of their own": (2, {"style": "alone", "own_rates": True}),
    "4 stages": (4, {"style": "alone", "num_stages": 4}),
    "2 stages of 2 ranks with buffers of their own": (4, {"buffer": True}),
    "2 stages of 2 ranks under FSDP2": (4, {"style": "fsdp"}),
    "2 stages of 2 ranks, by group": (4, {"declared": "by group"}),
}


@pytest.mark.quick("2 stages of 2 ranks under FSDP2")
@pytest.mark.parametrize("name", PIPELINES)
def test_a_killed_pipeline_continues_exactly(kit: Kit, name: str) -> None:
    num_ranks, options = PIPELINES[name]
    kit.assert_exact(Cell(train, options, num_ranks, (KillPoint.step(5),)))


@pytest.mark.quick("optimizer-by group")
@pytest.mark.parametrize(
    ("component", "declared"), [("model", "sharded"), ("optimizer", "by group")]
)
def test_a_component_left_out_is_caught_and_named(kit: Kit, component: str, declared: str) -> None:
    cell = Cell(train, {"declared": declared}, 4, (KillPoint.step(5),))
    kit.assert_caught(cell, component)


@pytest.mark.full
def test_buffers_left_out_are_caught_and_named(kit: Kit) -> None:
    cell = Cell(train, {"buffer": True}, 4, (KillPoint.step(5),))
    verdict, _ = kit.judge(cell, inject="model/rank_buffers")
    assert verdict.divergence is not None
    assert (verdict.divergence.component, verdict.divergence.leaf) == ("model", "seen")


def launched(kit: Kit, chain: tuple[tuple[int, dict[str, Any]], ...]) -> list[dict[str, Any]]:
    """What each launch of a run noted; every launch is cut in its own way."""
    run = None
    for num_ranks, options in chain:
        cell = Cell(take_over, options, num_ranks)
        run = kit.new_run(cell) if run is None else replace(run, cell=cell)
        run = kit.run_again(run)
        assert not run.failure, f"{cell}: {run.failure}"
    assert run is not None
    return [json.loads(line) for line in (run.directory / "notes.jsonl").read_text().splitlines()]


def test_stages_that_are_cut_differently_take_the_same_bits_over(kit: Kit) -> None:
    chain: tuple[tuple[int, dict[str, Any]], ...] = (
        (2, {"num_stages": 2}),
        (4, {"num_stages": 4}),
        (1, {}),
        (4, {"num_stages": 2, "style": "ddp"}),
        (2, {"num_stages": 2}),
        (4, {"num_stages": 2, "style": "fsdp"}),
        (2, {"num_stages": 1, "style": "fsdp"}),
        (4, {"num_stages": 4}),
    )
    notes = launched(kit, chain)
    for before, after in itertools.pairwise(notes):
        where = f"{before['layout']} -> {after['layout']}"
        assert after["resumed"], where
        assert after["state_found"] == before["state_saved"], where
        expected, found = before["losses"][-20:], after["losses"][:20]
        assert found == pytest.approx(expected, abs=LOSS_TOLERANCE), where


@pytest.mark.full
def test_stages_of_different_rates_keep_them_and_cannot_share_a_group(kit: Kit) -> None:
    chain: tuple[tuple[int, dict[str, Any]], ...] = (
        (2, {"num_stages": 2, "own_rates": True, "num_beyond": 0}),
        (4, {"num_stages": 4, "num_beyond": 0}),
    )
    for before, after in itertools.pairwise(launched(kit, chain)):
        assert after["state_found"] == before["state_saved"]
        rates = {name: rate for name, rate in after["state_found"].items() if name.endswith(".lr")}
        assert set(rates.values()) == {0.005, 0.01, 0.02}
    run = kit.run_again(kit.new_run(Cell(take_over, chain[0][1], 2)))
    run = kit.run_again(replace(run, cell=Cell(take_over, {}, 1)))
    assert "StateMismatchError" in run.failure
    assert "param_groups[0]['lr']: 0.01 for embed.weight and 0.02 for" in run.failure


def test_a_layer_that_no_stage_holds_is_named(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(take_over, {"num_stages": 2, "num_beyond": 0}, 2)))
    assert not run.failure, run.failure
    shallow = {"num_stages": 2, "num_layers": 2, "num_beyond": 0}
    run = kit.run_again(replace(run, cell=Cell(take_over, shallow, 2)))
    assert "StateMismatchError" in run.failure
    assert "model: head.bias: in no pipeline stage of this run (and 9 more)" in run.failure


@pytest.mark.full
@pytest.mark.parametrize("num_nodes", [2, 3])
def test_what_each_node_has_is_restored_on_it(kit: Kit, num_nodes: int) -> None:
    options = {"num_nodes": num_nodes}
    kit.assert_exact(Cell(train_on_nodes, options, 4, (KillPoint.step(5),)))
    kit.assert_caught(Cell(train_on_nodes, options, 4, (KillPoint.step(5),)), "callbacks/cache")


@pytest.mark.full
def test_ranks_of_a_node_that_differ_are_named(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(train_on_nodes, {"drift": True}, 4)))
    assert "callbacks/cache: value: replicated, but ranks differ (rank 2: " in run.failure


def test_another_number_of_nodes_is_refused_and_named(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(train_on_nodes, {}, 4)), kill=KillPoint.step(5))
    run = kit.run_again(replace(run, cell=Cell(train_on_nodes, {"num_nodes": 1}, 4)))
    assert (
        "callbacks/cache: the groups of ranks [0, 1, 2, 3], expected [0, 1], [2, 3]" in run.failure
    )


@pytest.mark.full
def test_ranks_of_the_same_data_count_once_and_lose_no_sample(kit: Kit) -> None:
    jobs = ((2, 1), (4, 2), (1, 1), (4, 1), (2, 2), (4, 4), (4, 2))  # ranks and replicas
    run = None
    taken: list[int] = []
    for num_ranks, num_replicas in jobs:
        cell = Cell(share_data, {"num_replicas": num_replicas}, num_ranks)
        run = kit.new_run(cell) if run is None else replace(run, cell=cell)
        run = kit.run_again(run)
        assert not run.failure, f"{cell}: {run.failure}"
        noted = [
            json.loads(
                (run.directory / f"notes-{num_ranks}-{num_replicas}-{rank}.json").read_text()
            )
            for rank in range(num_ranks)
        ]
        alike = num_ranks // num_replicas
        for first in range(0, num_ranks, alike):
            # The same samples, and from then on the same random numbers.
            assert all(each == noted[first] for each in noted[first : first + alike])
            taken += noted[first][0]
        assert noted[0][1] == len(taken)
        random_numbers = {drawn for _, _, drawn in noted}
        assert len(random_numbers) == num_replicas
    assert len(set(taken)) == len(taken) == 3 * 4 * len(jobs)


def test_another_number_of_replicas_is_refused_unless_it_may_change(kit: Kit) -> None:
    run = kit.run_again(kit.new_run(Cell(share_data, {"num_replicas": 1}, 2)))
    assert not run.failure, run.failure
    options = {"num_replicas": 2, "may_change": False}
    run = kit.run_again(replace(run, cell=Cell(share_data, options, 2)))
    assert "a job of 2 ranks, expected 2 ranks that share 1 parts" in run.failure


@pytest.mark.full
def test_the_example_of_a_trainer_of_ones_own_is_exact(kit: Kit) -> None:
    script = Path(__file__).parents[1] / "scripts" / "train_pipeline.py"
    kit.assert_exact(Cell(f"{script}:main", {"epochs": 1}, 4, (KillPoint.step(15),)))
    kit.assert_caught(Cell(f"{script}:main", {"epochs": 1}, 4, (KillPoint.step(15),)), "optimizer")
