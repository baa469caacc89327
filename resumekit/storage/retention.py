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
        keep_best: how many of the steps with the best metric; 0 only where the best may go.
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

    Only the last revision of a step counts; the ones before it are superseded and go. The best are
    chosen among the checkpoints that report the newest one's metric, in its mode; of equal ones the
    earlier is the better, and a NaN is never among them.

    Args:
        checkpoints: of this run, verified, in any order.
        policy: what to keep.
    """
    if policy.keep_latest is None or not checkpoints:
        return frozenset()
    last_revisions = {item.name.step: item for item in sorted(checkpoints, key=_name)}
    current = sorted(last_revisions.values(), key=_name)
    kept = {item.name for item in current[-policy.keep_latest :]}
    kept |= {item.name for item in _from_best(current)[: policy.keep_best]}
    if policy.keep_every is not None:
        kept |= {item.name for item in current if item.name.step % policy.keep_every == 0}
    return frozenset(item.name for item in checkpoints) - kept


def _name(checkpoint: Checkpoint) -> StepName:
    return checkpoint.name


def _from_best(current: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Those with a comparable metric, the best one first."""
    kinds = [_kind(item) for item in current if item.metric is not None]
    if not kinds:
        return []
    sign = -1.0 if kinds[-1] is not None and kinds[-1][1] == "max" else 1.0
    ranked = [
        (sign * value, item.name, item)
        for item in current
        if item.metric is not None and _kind(item) == kinds[-1]
        if not math.isnan(value := float.fromhex(item.metric["value"]))
    ]
    return [item for _, _, item in sorted(ranked, key=lambda row: row[:2])]


def _kind(checkpoint: Checkpoint) -> tuple[str, str] | None:
    metric = checkpoint.metric
    return None if metric is None else (metric["name"], metric["mode"])
