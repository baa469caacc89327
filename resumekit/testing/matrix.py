"""Choosing the cells of a test matrix: all of them, or enough that every pair of values meets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from resumekit.errors import ConfigurationError

# Choosing is quadratic in the worst case; beyond this a matrix should be split by hand.
MAX_COMBINATIONS = 200_000

Combination = dict[str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    *,
    full: bool = False,
    allowed: Callable[[Combination], bool] = lambda combination: True,
) -> list[Combination]:
    """Combinations in which every two values of two factors meet at least once.

    Most defects need one value or two that meet; a full product finds the rest. The choice is
    greedy and deterministic: the same factors give the same combinations in the same order.

    Args:
        factors: the values of each factor by name.
        full: give the whole product instead, e.g. for a nightly run.
        allowed: says whether a combination has a meaning; pairs that only meet in others are left
            out.

    Raises:
        ConfigurationError: a factor has no values, or there are too many combinations.
    """
    _check(factors)
    product = itertools.product(*(range(len(values)) for values in factors.values()))
    rows = [row for row in product if allowed(_combination(factors, row))]
    if not full:
        rows = _cover_pairs(rows)
    return [_combination(factors, row) for row in rows]


def _cover_pairs(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Greedily the rows that together hold every pair that any row holds, in their own order."""
    bits: dict[tuple[tuple[int, int], ...], int] = {}
    masks: list[int] = []
    for row in rows:
        places = list(enumerate(row))
        # A single factor has no pairs: its values are covered one by one.
        groups = itertools.combinations(places, min(2, len(places)))
        masks.append(sum(1 << bits.setdefault(group, len(bits)) for group in groups))
    uncovered = (1 << len(bits)) - 1
    chosen: list[int] = []
    while uncovered:
        best = max(range(len(rows)), key=lambda index: (masks[index] & uncovered).bit_count())
        chosen.append(best)
        uncovered &= ~masks[best]
    return [rows[index] for index in sorted(chosen)]


def _combination(factors: Mapping[str, Sequence[Any]], row: tuple[int, ...]) -> Combination:
    return {name: values[index] for (name, values), index in zip(factors.items(), row, strict=True)}


def _check(factors: Mapping[str, Sequence[Any]]) -> None:
    num_combinations = 1
    for name, values in factors.items():
        if not values:
            raise ConfigurationError(name, found="no values", expected="at least one")
        num_combinations *= len(values)
    if num_combinations > MAX_COMBINATIONS:
        raise ConfigurationError(
            "factors",
            found=f"{num_combinations} combinations",
            expected=f"at most {MAX_COMBINATIONS}",
            remedy="Split the matrix",
        )
