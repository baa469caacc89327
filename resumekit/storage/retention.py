"""Which checkpoints may go. Pure: it sees names and metrics, and touches nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from resumekit.errors import ConfigurationError
from resumekit.storage.names import StepName


@dataclass(frozen=True)
class RetentionPolicy:
    """What to keep; the newest checkpoint stays under every policy.

    Args:
        keep_latest: how many of the newest steps; None keeps everything.
        keep_best: how many of the steps with the best metric; 0 lets the best one go, too.
        keep_every: steps that are a multiple of it are kept for ever; None for none.

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
    """What retention has to know about one checkpoint.

    Args:
        name: of its step directory.
        metric: the manifest's ``{"name", "mode", "value"}``, if there is one.
    """

    name: StepName
    metric: Mapping[str, str] | None = None


def select_deletions(
    checkpoints: Sequence[Checkpoint], policy: RetentionPolicy
) -> frozenset[StepName]:
    """The checkpoints that the policy lets go.

    Only the last revision of a step counts; the ones before it are superseded and go. Where a run
    has changed its metric or its mode, the best of each one stay. Of equal values the earlier is
    the better, and a NaN is never among the best.

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


def _name(checkpoint: Checkpoint) -> StepName:
    return checkpoint.name


def _rankings(current: Sequence[Checkpoint]) -> list[list[StepName]]:
    """For each metric and mode the names of the checkpoints that report it, the best one first."""
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
