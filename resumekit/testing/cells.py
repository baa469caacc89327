"""What is to be tested: a training function, its options, where it is killed, and which of all."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resumekit.errors import ConfigurationError
from resumekit.record.trace import KillPoint
from resumekit.testing.task import target_of


@dataclass(frozen=True)
class Cell:
    """One cell of a test matrix.

    Args:
        function: the training function, ``function(directory, **options)``: at the top level of a
            file, or as ``"module:function"``. Each call must start, resume or do nothing, as the
            directory says.
        options: keyword arguments for it; plain JSON values.
        world_size: ranks; each is a process with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
            ``MASTER_ADDR`` and ``MASTER_PORT`` set.
        kills: one launch is killed at each of these, in this order; the last launch is left alone.
    """

    function: str | Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1
    kills: tuple[KillPoint, ...] = ()

    @property
    def target(self) -> str:
        """The text by which another process finds the function."""
        return target_of(self.function)

    @property
    def run_key(self) -> str:
        """Equal for cells whose uninterrupted runs are the same."""
        return json.dumps([self.target, dict(self.options), self.world_size], sort_keys=True)

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        kills = ", ".join(map(str, self.kills))
        name = self.target.rpartition(":")[2]
        return f"{name}({options}) on {self.world_size} rank(s), killed at [{kills}]"


# The names of the kill points that ``kill_points`` gives.
KILL_POINTS = (
    "mid-epoch 0",
    "mid-epoch 1",
    "on the boundary",
    "on the last step",
    "after the last save",
    "twice in one epoch",
    "three times",
)

# An epoch needs a step that is neither its first nor its last.
_SHORTEST_EPOCH = 3


def kill_points(
    steps_per_epoch: int, save_every: int, *, num_epochs: int = 2
) -> dict[str, tuple[KillPoint, ...]]:
    """The kill points of one run by name; the name says what is special there.

    ========================  =====================================================================
    mid-epoch 0               between two saves of the first epoch
    mid-epoch 1               the same in the second: order and random numbers of a later epoch
    on the boundary           an epoch's last checkpoint was committed, nothing of the next is done
    on the last step          the run's last step is done, and nothing of it is saved
    after the last save       all is saved, and the process dies before it can return
    twice in one epoch        the second resume reads what a launch wrote that began mid-epoch
    three times               twice after one and the same save, then at a commit in the next epoch
    ========================  =====================================================================

    Args:
        steps_per_epoch: optimizer steps of one epoch.
        save_every: steps from one save to the next.
        num_epochs: epochs of the whole run.

    Raises:
        ConfigurationError: the epoch has no such points.
    """
    epoch, every = steps_per_epoch, save_every
    if epoch < _SHORTEST_EPOCH or every < 1 or epoch <= every or epoch % every:
        raise ConfigurationError(
            "steps_per_epoch, save_every",
            found=f"{epoch}, {every}",
            expected=f"at least {_SHORTEST_EPOCH} steps, more than one save, the last at the end",
        )
    if num_epochs < 2:
        raise ConfigurationError("num_epochs", found=str(num_epochs), expected="2 or more")
    saved = max(epoch // every // 2, 1) * every  # a save in the middle of an epoch
    middle = saved + (every + 1) // 2
    step, checkpoint = KillPoint.step, KillPoint.checkpoint
    return {
        "mid-epoch 0": (step(middle),),
        "mid-epoch 1": (step(epoch + middle),),
        "on the boundary": (checkpoint(epoch),),
        "on the last step": (step(num_epochs * epoch),),
        "after the last save": (checkpoint(num_epochs * epoch),),
        "twice in one epoch": (
            step(epoch + every + 1),
            step(epoch + min(2 * every + 2, epoch)),
        ),
        "three times": (step(every + 1), step(every + 2), checkpoint(epoch + every)),
    }


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
        cells = list(enumerate(row))
        # A single factor has no pairs: its values are covered one by one.
        groups = itertools.combinations(cells, min(2, len(cells)))
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
