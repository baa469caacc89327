"""Accelerate with another number of ranks, or other batches, than the epoch was begun with."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from preloads import ACCELERATE

pytest.importorskip("accelerate")

import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from accelerate_workloads import NUM_SAMPLES, train
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from used_samples import counts, ledger

from resumekit.data.epoch_order import Batching, order_name, redraw_order
from resumekit.testing import Cell, KillPoint, Kit, Run

PRELOAD = ACCELERATE
ALLOWED = ["world_size", "batch_size"]


def relaunched(
    kit: Kit, options: dict[str, Any], ranks: tuple[int, ...], *, inject: str | None = None
) -> Run:
    """A run with these ranks in turn; each launch but the last is killed at its fifth step."""
    run = kit.new_run(Cell(train, {"allow": ALLOWED, **options}), inject=inject)
    for number, world_size in enumerate(ranks, start=1):
        is_last = number == len(ranks)
        kill = None if is_last else KillPoint.step(3 * number + 2)
        run = kit.run_again(replace(run, cell=replace(run.cell, world_size=world_size)), kill=kill)
    return run


# 92 samples in batches of 8, saved at steps 3, 6, ...
@pytest.mark.quick("shuffle-ranks0-4", "generator-ranks5-12")
@pytest.mark.parametrize(
    ("loader", "ranks", "padding"),
    [
        ("shuffle", (2, 3), 4),
        ("shuffle", (2, 1, 2), 12),
        ("seedable", (1, 2), 12),
        ("seedable", (2, 1, 2), 12),
        ("generator", (2, 1), 0),
        ("generator", (1, 2), 12),
    ],
)
def test_the_rest_of_the_epoch_is_divided_among_the_new_ranks(
    kit: Kit, loader: str, ranks: tuple[int, ...], padding: int
) -> None:
    used = counts(ledger(relaunched(kit, {"loader": loader, "augment": True}, ranks)))
    assert all(set(count) == set(range(NUM_SAMPLES)) for count in used.values())
    assert used[0].total() == NUM_SAMPLES + padding


def test_a_position_that_was_not_restored_shows(kit: Kit) -> None:
    used = counts(ledger(relaunched(kit, {}, (2, 1), inject="data")))
    assert used[0].total() > NUM_SAMPLES


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"split": True}, "an order that each of 2 ranks went through by itself"),
        ({"even": False}, "an order that each of 2 ranks went through by itself"),
        ({"allow": []}, "a job of 1 ranks"),
    ],
    ids=str,
)
def test_what_cannot_be_divided_is_refused_and_named(
    kit: Kit, options: dict[str, Any], found: str
) -> None:
    run = relaunched(kit, options, (2, 1))
    assert found in run.failure


# What is relied on that accelerate does not document. One that fails here has moved.


def test_pin_how_batches_are_assigned_to_ranks() -> None:
    choose = random.Random(0)
    for _ in range(200):
        length, size = choose.randint(1, 40), choose.randint(1, 6)
        ranks, drop_last = choose.randint(2, 4), choose.random() < 0.3
        sampler: Any = BatchSampler(range(length), size, drop_last)
        for rank in range(ranks):
            shard = BatchSamplerShard(sampler, ranks, rank)
            batching = Batching.of(DataLoader(range(length), batch_sampler=shard))  # type: ignore[arg-type]
            assert batching.by_batches
            assert (batching.num_replicas, batching.replica) == (ranks, rank)
            indices = batching.share(torch.arange(length).numpy(), 0)
            mine = list(batching.in_batches(indices))
            assert mine == list(shard), (length, size, ranks, rank, drop_last)
            assert len(mine) == batching.num_batches(batching.num_mine(length))


def test_pin_what_names_the_order_of_a_seeded_sampler() -> None:
    sampler = SeedableRandomSampler(range(20), data_seed=5)
    sampler.set_epoch(3)
    name = order_name(sampler, {})
    assert list(sampler) == list(redraw_order(name, None))  # type: ignore[call-overload]
    assert order_name(SeedableRandomSampler(range(20), replacement=True), {})["kind"] == "unknown"
    assert order_name(RandomSampler(range(20)), {})["kind"] == "drawn"
