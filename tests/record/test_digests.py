"""Digests of sample ids and random states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from resumekit.record.step_values import RandomStates, SampleIds, learning_rates_digest, plain_rates


def ids_of(*batches: Any) -> SampleIds:
    ids = SampleIds()
    for batch in batches:
        ids.add(batch, 0 if batch is None else 1)
    return ids


def test_the_order_shows_in_one_digest_and_not_in_the_other() -> None:
    one, other = ids_of([1, 2, 3]), ids_of([3, 1, 2])
    assert one.ordered != other.ordered
    assert one.unordered == other.unordered
    assert one.unordered != ids_of([1, 2, 4]).unordered


def test_the_sums_of_two_ranks_are_the_sum_of_one_rank() -> None:
    one = ids_of(list(range(100)))
    two = [ids_of(list(range(0, 100, 2))), ids_of(list(range(1, 100, 2)))]
    assert one.unordered == sum(each.unordered for each in two) % 2**64


def test_ids_that_are_swapped_between_two_samples_do_not_cancel_out() -> None:
    assert ids_of([0, 3]).unordered != ids_of([1, 2]).unordered


@pytest.mark.parametrize("num_ids", [1, 63, 64, 1000])
def test_the_sum_of_many_ids_is_that_of_each_one(num_ids: int) -> None:
    ids = [(-1) ** n * n**5 for n in range(num_ids)]
    alone = sum(ids_of([each]).unordered for each in ids)
    assert ids_of(ids).unordered == alone % 2**64


def test_the_digests_are_those_of_journals_that_exist() -> None:
    ids = ids_of([3, -1, 2**40])
    assert (ids.ordered, ids.unordered) == (0x4EF2C84A5C35D3DA, 0x9F2E3EE785338DAB)


@pytest.mark.parametrize(
    "ids", [[1, 2], ["a", "b"], [("x", 1), ("y", 2)], 7, torch.tensor([1, 2]), np.arange(2)]
)
def test_ids_of_many_kinds_have_a_digest(ids: Any) -> None:
    assert ids_of(ids).is_complete
    assert ids_of(ids).ordered == ids_of(ids).ordered != 0


@pytest.mark.parametrize("ids", [None, [object()], [np.arange(2)], [torch.arange(2)]])
def test_a_batch_without_ids_leaves_the_step_without_a_digest(ids: Any) -> None:
    assert not ids_of([1, 2], ids).is_complete


@pytest.mark.parametrize(
    ("draw", "changes"),
    [
        (torch.rand, "torch"),
        (lambda _: random.random(), "host"),
        (lambda _: np.random.rand(), "host"),
        (lambda _: np.random.standard_normal(), "host"),
        (lambda _: random.gauss(0.0, 1.0), "host"),
    ],
)
def test_a_draw_changes_one_digest(draw: Any, changes: str) -> None:
    states = RandomStates({})
    before = {"torch": states.torch(), "host": states.host()}
    assert before == {"torch": states.torch(), "host": states.host()}
    draw(1)
    after = {"torch": states.torch(), "host": states.host()}
    assert {name for name in before if before[name] != after[name]} == {changes}
    assert states.devices() is None


def test_a_generator_that_the_user_named_is_among_them() -> None:
    named = np.random.default_rng(0)
    states = RandomStates({"named": named})
    before = states.host()
    named.random()
    assert states.host() != before


def test_learning_rates_are_read_from_tensors_on_the_cpu_and_from_no_other_device() -> None:
    assert plain_rates([{"lr": 0.1}, {"lr": torch.tensor(0.5)}, {}]) == [0.1, 0.5, 0.0]
    assert plain_rates([{"lr": torch.empty((), device="meta")}]) is None
    assert learning_rates_digest([0.1, 0.2]) != learning_rates_digest([0.2, 0.1])
