"""What ``prove`` found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from resumekit.prove.verdict import Verdict


class Outcome(str, Enum):
    """The answer of one trial."""

    EXACT = "exact"  # the killed run is the uninterrupted one
    DIVERGED = "diverged"  # it is not
    NOT_REPRODUCIBLE = "not reproducible"  # the two differ before the first kill
    FAILED = "failed"  # a relaunch after a kill failed
    CAUGHT = "caught"  # a component was left out, and the verdict names it
    MISNAMED = "misnamed"  # it was left out, and the verdict names something else
    MISSED = "missed"  # it was left out, and nobody noticed
    NO_EFFECT = "no effect"  # the same, and it never held anything but its first state


_GOOD = frozenset({Outcome.EXACT, Outcome.CAUGHT, Outcome.NO_EFFECT})


@dataclass(frozen=True)
class LaunchSummary:
    """One launch of the command.

    Args:
        number: from 0.
        killed_after_step: the newest step that was traced when it was killed; None when it was
            left alone, or died before its first step.
        was_killed: whether it was killed.
        exit_status: its exit status; negative is a signal.
        seconds: its wall-clock time.
        at: the chosen place at which it was to be killed; None for a random instant.
    """

    number: int
    killed_after_step: int | None
    was_killed: bool
    exit_status: int
    seconds: float
    at: str | None = None

    @property
    def where(self) -> str:
        """Where it was killed, in words."""
        return f"after step {self.killed_after_step}" if self.at is None else f"at {self.at}"


@dataclass(frozen=True)
class Trial:
    """One run that was killed and relaunched until it ended.

    Args:
        injected: the component that was deliberately not restored; None for a plain trial.
        outcome: the answer.
        verdict: the comparison with the uninterrupted run; None when there was nothing to compare.
        failure: what a failing relaunch wrote last; empty when none failed.
        launches: every launch, in order.
        num_left_behind: processes that outlived a launch which ended by itself; they were killed.
        digests: one digest per component of the last state, by name.
    """

    injected: str | None
    outcome: Outcome
    verdict: Verdict | None
    failure: str
    launches: tuple[LaunchSummary, ...]
    num_left_behind: int
    digests: Mapping[str, str]

    @property
    def num_kills(self) -> int:
        """How many kills hit: a run may be over before the last ones."""
        return sum(launch.was_killed for launch in self.launches)

    @property
    def seconds(self) -> float:
        """The wall-clock time of all launches together."""
        return sum(launch.seconds for launch in self.launches)


@dataclass(frozen=True)
class ProveResult:
    """The whole answer.

    Args:
        command: as the user wrote it.
        world: ranks.
        at: the chosen places of the kills; empty when they were random instants.
        seed: what the random instants were drawn from; None when there were none.
        num_kills_asked: kills per trial.
        num_steps: steps of the uninterrupted run.
        reference_seconds: its wall-clock time.
        reference_digests: one digest per component of its last state.
        trials: the plain trial, or one for each injected component.
    """

    command: tuple[str, ...]
    world: int
    at: tuple[str, ...]
    seed: int | None
    num_kills_asked: int
    num_steps: int
    reference_seconds: float
    reference_digests: Mapping[str, str]
    trials: tuple[Trial, ...]

    @property
    def ok(self) -> bool:
        """Exact; or, with injections, each of them caught and named."""
        return all(trial.outcome in _GOOD for trial in self.trials)

    @property
    def exit_code(self) -> int:
        """0 when ``ok``, otherwise 1."""
        return 0 if self.ok else 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a JSON report."""
        return {"ok": self.ok, **asdict(self)}
