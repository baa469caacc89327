"""Whether a measured ratio meets its target, judged by how its rounds differ.

A ratio is the median over rounds in which all contenders ran one after the other. A bootstrap over
the rounds gives the interval of that median. A target is met when the whole interval is on its
good side and not met when the whole interval is on the other; otherwise, and with too few rounds,
the row is ``not measurable``.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

MIN_ROUNDS = 7
CONFIDENCE = 0.9
_NUM_RESAMPLES = 5_000

T = TypeVar("T")


class Verdict(str, Enum):
    """What a row's last column says."""

    MET = "met"
    NOT_MET = "not met"
    NOT_MEASURABLE = "not measurable"
    NOT_BUILT = "not built"
    DOES_NOT_APPLY = "does not apply"
    NO_TARGET = ""


@dataclass(frozen=True)
class Target:
    """The most that a ratio may be.

    Args:
        limit: of the ratio.
        is_strict: whether the ratio must be below the limit.
        unit: behind the number; ``x`` for a ratio.
        min_rounds: with fewer of them nothing is judged.
        is_upper_bound: whether the target is about the one-sided upper bound of ``CONFIDENCE``; by
            default it is about the median, and both ends of its two-sided interval count.
    """

    limit: float
    is_strict: bool = False
    unit: str = "x"
    min_rounds: int = MIN_ROUNDS
    is_upper_bound: bool = False

    def __str__(self) -> str:
        return f"{'<' if self.is_strict else '≤'} {self.limit:.2f}{self.unit}"

    def is_met_by(self, value: float) -> bool:
        """Whether this value is on the good side of the limit."""
        return value < self.limit if self.is_strict else value <= self.limit

    @property
    def tail(self) -> float:
        """How much of the bootstrap, 0 to 1, is cut off at each end of the interval."""
        return (1 - CONFIDENCE) / (1 if self.is_upper_bound else 2)


@dataclass(frozen=True)
class Judgement:
    """One figure of a table: its value, the interval of the value, and the verdict.

    Args:
        value: the median of the rounds; None for what was not measured.
        low: the lower end of the interval.
        high: the upper end.
        target: None for a row that only informs.
        verdict: of the value against the target.
    """

    value: float | None
    low: float
    high: float
    target: Target | None
    verdict: Verdict

    def cells(self) -> tuple[str, str, str, str]:
        """Value, interval, target, verdict."""
        target = "" if self.target is None else str(self.target)
        if self.value is None:
            return "", "", target, self.verdict.value
        unit = "x" if self.target is None else self.target.unit
        interval = f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.value:.2f}{unit}", interval, target, self.verdict.value


def judge(values: Sequence[float], target: Target | None) -> Judgement:
    """The judgement on the median of one value for each round."""
    return judge_statistic(values, statistics.median, target)


def judge_statistic(
    rounds: Sequence[T], statistic: Callable[[Sequence[T]], float], target: Target | None
) -> Judgement:
    """The judgement on a statistic of rounds.

    Args:
        rounds: what was measured in each; resampled as a whole.
        statistic: of some rounds.
        target: the limit; None to state the interval only.
    """
    value = statistic(rounds)
    low, high = _interval(rounds, statistic, (target or Target(0)).tail)
    if target is None:
        verdict = Verdict.NO_TARGET
    elif len(rounds) < target.min_rounds:
        verdict = Verdict.NOT_MEASURABLE
    elif target.is_met_by(high):
        verdict = Verdict.MET
    elif target.is_met_by(low):
        verdict = Verdict.NOT_MEASURABLE
    else:
        verdict = Verdict.NOT_MET
    return Judgement(value, low, high, target, verdict)


def not_measured(target: Target | None, why: Verdict = Verdict.NOT_BUILT) -> Judgement:
    """The row of a feature that is not there, or of a target that does not apply."""
    return Judgement(None, 0, 0, target, why)


def paired_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """One plus the median paired difference over the median of the first ones."""
    added = statistics.median(second - first for first, second in pairs)
    return 1 + added / statistics.median(first for first, _ in pairs)


def _interval(
    rounds: Sequence[T], statistic: Callable[[Sequence[T]], float], tail: float
) -> tuple[float, float]:
    """The percentile bootstrap's interval; the same for the same rounds."""
    generator = random.Random(0)
    found = sorted(
        statistic(generator.choices(rounds, k=len(rounds))) for _ in range(_NUM_RESAMPLES)
    )
    last = len(found) - 1
    return found[round(tail * last)], found[round((1 - tail) * last)]


HEADINGS = (
    *("figure", "median", "against", "its median", "ratio", "90 % interval", "target"),
    *("verdict", "extra memory"),
)


def compared(
    figure: str,
    ours: Sequence[float],
    against: str,
    theirs: Sequence[float],
    target: Target | None,
    *,
    memory: str = "",
) -> tuple[str, ...]:
    """The row of a ratio: both medians, and the judgement on the rounds' ratios.

    Args:
        figure: what was measured.
        ours: its seconds in each round; none for what is not built.
        against: what it is compared with.
        theirs: the seconds of that in the same rounds.
        target: of the ratio.
        memory: the last cell.
    """
    if not ours:
        median = shown(statistics.median(theirs)) if theirs else ""
        return (figure, "", against, median, *not_measured(target).cells(), memory)
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    medians = shown(statistics.median(ours)), shown(statistics.median(theirs))
    return (figure, medians[0], against, medians[1], *judge(ratios, target).cells(), memory)


def stated(figure: str, seconds: Sequence[float], *, memory: str = "") -> tuple[str, ...]:
    """The row of a duration that is compared with nothing, such as a limit of the machine."""
    median = shown(statistics.median(seconds)) if seconds else ""
    return (figure, median, *[""] * 6, memory)


def shown(seconds: float) -> str:
    """Seconds in milliseconds."""
    return f"{seconds * 1e3:,.1f} ms" if abs(seconds) < 0.1 else f"{seconds * 1e3:,.0f} ms"
