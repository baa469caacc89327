"""What a launch is asked to record, and at which step of the whole run it continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RecorderSettings:
    """Settings of one launch, as JSON in the list of activations.

    Args:
        directory: where each process writes its records.
        positions: a directory with one file per rank: the known weights of this run, by step;
            empty in a launch that continues nothing.
        kill: the point at which a process kills itself, as ``KillPoint`` reads it.
        digest_every: states are digested at every n-th step.
    """

    directory: str
    positions: str = ""
    kill: str = ""
    digest_every: int = 1

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> RecorderSettings:
        """The settings in a list of activations."""
        return cls(**values)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for the list of activations."""
        return asdict(self)

    def positions_of(self, rank: int) -> Path | None:
        """The known weights of a rank; None when the launch continues nothing."""
        return Path(self.positions) / f"rank-{rank:05d}.json" if self.positions else None


# ---------------------------------------------------------------- where a launch continues


@dataclass(frozen=True)
class Position:
    """What is true before one optimizer step.

    Args:
        step: the step, counted over the whole run from 1.
        weights: the digest of the parameters that the step changes.
        counter: the highest step counter in the optimizer's state; 0 where it has none.
        lr: the learning rates of the step.
    """

    step: int
    weights: str
    counter: int = 0
    lr: tuple[str, ...] = ()


@dataclass(frozen=True)
class Origin:
    """The first step of a launch, and how it was found.

    Args:
        step: counted over the whole run.
        by: ``weights``: those before this step; ``counter``: the weights are of no step, the
            counters of the optimizer are; ``ambiguous``: the weights are of several steps, and the
            newest is taken; ``nothing``: neither is of any step.
    """

    step: int
    by: str


def align(now: Position, known: Sequence[Position]) -> Origin:
    """Where a launch continues.

    Args:
        now: before its first step; ``step`` is not used.
        known: the positions of the uninterrupted run and of the launches before this one.
    """
    same = [one for one in known if one.weights == now.weights]
    if not same:
        counted = {one.step for one in known if now.counter and one.counter == now.counter}
        return Origin(counted.pop(), "counter") if len(counted) == 1 else Origin(1, "nothing")
    # A state that was lost agrees with no candidate, and then it decides nothing.
    for agrees in (
        [one for one in same if one.counter == now.counter],
        [one for one in same if one.lr == now.lr],
    ):
        same = [one for one in same if one in agrees] or same
    steps = {one.step for one in same}
    return Origin(max(steps), "weights" if len(steps) == 1 else "ambiguous")
