"""Which checkpoints are kept, and which are deleted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resumekit.errors import ConfigurationError
from resumekit.storage.directories import StepName


@dataclass(frozen=True)
class RetentionPolicy:
    """Which checkpoints to keep; the newest one always stays.

    Args:
        keep_latest: how many of the newest steps; None keeps everything.
        keep_best: how many of the steps with the best metric; 0 keeps none of them.
        keep_every: multiples of it are kept for ever; None for none.

    Raises:
        ConfigurationError: a number out of range.
    """

    keep_latest: int | None = 2
    keep_best: int = 1
    keep_every: int | None = None

    def __post_init__(self) -> None:
        for name, value, minimum in (
            ("keep_latest", self.keep_latest, 1),
            ("keep_best", self.keep_best, 0),
            ("keep_every", self.keep_every, 1),
        ):
            if value is not None and (type(value) is not int or value < minimum):
                raise ConfigurationError(
                    name, found=repr(value), expected=f"an integer of at least {minimum}"
                )


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as retention sees it.

    Args:
        name: of its step directory.
        metric: the manifest's ``{"name", "mode", "value"}``, if there is one.
    """

    name: StepName
    metric: Mapping[str, str] | None = None


def select_deletions(
    checkpoints: Sequence[Checkpoint], policy: RetentionPolicy
) -> frozenset[StepName]:
    """The checkpoints to delete under the policy.

    Earlier revisions of a step are deleted. Where a run changed its metric or its mode, the best of
    each are kept. Of equal values the earlier is better, and a NaN is never among the best.

    Args:
        checkpoints: of this run, verified, in any order.
        policy: what to keep.
    """
    if policy.keep_latest is None or not checkpoints:
        return frozenset()
    last_revisions = {item.name.step: item for item in sorted(checkpoints, key=_name)}
    current = sorted(last_revisions.values(), key=_name)
    kept = {item.name for item in current[-policy.keep_latest :]}
    for ranked in _rankings(current):
        kept |= set(ranked[: policy.keep_best])
    if policy.keep_every is not None:
        kept |= {item.name for item in current if item.name.step % policy.keep_every == 0}
    return frozenset(item.name for item in checkpoints) - kept


def may_delete(names: Sequence[StepName], policy: RetentionPolicy) -> frozenset[StepName]:
    """The most that the policy can delete, whatever their metrics are and whichever are damaged."""
    return select_deletions([Checkpoint(name) for name in names], policy)


def _name(checkpoint: Checkpoint) -> tuple[int, int]:
    return checkpoint.name.step, checkpoint.name.revision


def _rankings(current: Sequence[Checkpoint]) -> list[list[StepName]]:
    """The names of the checkpoints with each metric and mode, the best one first."""
    values: dict[tuple[str, str], list[tuple[float, StepName]]] = {}
    for item in current:
        if item.metric is None:
            continue
        value = float.fromhex(item.metric["value"])
        if not math.isnan(value):
            mode = item.metric["mode"]
            cost = value if mode == "min" else -value
            values.setdefault((item.metric["name"], mode), []).append((cost, item.name))
    return [[name for _, name in sorted(rows)] for rows in values.values()]
