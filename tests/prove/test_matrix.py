"""The choice of a matrix's cells: small, complete in pairs, the same every time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resumekit.errors import ConfigurationError
from resumekit.testing import pairwise

Factors = dict[str, list[int]]

factors = st.lists(st.integers(1, 4), min_size=2, max_size=5).map(
    lambda sizes: {f"factor{index}": list(range(size)) for index, size in enumerate(sizes)}
)


def pairs(combination: dict[str, Any]) -> set[Any]:
    return set(itertools.combinations(combination.items(), 2))


@given(factors)
@settings(max_examples=60, deadline=None)
def test_every_pair_of_values_meets(factors: Factors) -> None:
    chosen = pairwise(factors)
    everything = pairwise(factors, full=True)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, everything))
    assert all(combination in everything for combination in chosen)


@given(factors)
@settings(max_examples=20, deadline=None)
def test_every_pair_that_is_allowed_meets_and_none_else_is_chosen(factors: Factors) -> None:
    def allowed(combination: dict[str, int]) -> bool:
        return combination["factor0"] != combination["factor1"]

    chosen = pairwise(factors, allowed=allowed)
    everything = pairwise(factors, full=True, allowed=allowed)
    assert all(allowed(combination) for combination in chosen)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, everything))


def test_the_choice_is_small_and_repeats_itself() -> None:
    factors: dict[str, Any] = {
        "kill": ["mid", "boundary", "last", "between", "first"],
        **{name: [False, True] for name in ("dropout", "ema", "workers", "scheduler", "amp")},
        "world_size": [1, 2],
    }
    chosen = pairwise(factors)
    assert chosen == pairwise(factors)
    assert len(chosen) <= 14
    assert len(pairwise(factors, full=True)) == 320


def test_one_factor_gives_each_of_its_values() -> None:
    assert pairwise({"a": [1, 2, 3]}) == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_a_factor_without_values_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no values"):
        pairwise({"a": [1], "b": []})


def test_a_matrix_too_large_to_choose_from_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="1000000 combinations"):
        pairwise({f"f{n}": list(range(10)) for n in range(6)})
