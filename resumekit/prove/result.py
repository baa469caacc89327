"""What a comparison of two runs comes to, and the whole answer of ``prove``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

# In the names of leaves.
_GENERATORS = frozenset({"rng", "python", "numpy", "torch", "cuda"})

# The component that a divergence names when steps are missing or a run did not resume.
RUN = "run"

# Its leaf when a launch continues from none of the run's weights.
WEIGHTS = "weights"

# Every kill point is right after a step or a checkpoint, or at a random time after a step.
_NOT_TRIED = "kills inside saves: not tried"


@dataclass(frozen=True)
class Divergence:
    """The first place where two runs differ.

    Args:
        step: the optimizer step.
        rank: the rank on which it was seen.
        component: the component key, or the field of the step record: ``data``, ``lr``, ``rng``,
            the name of a value such as ``loss``, or ``run`` for missing steps.
        leaf: the tensor or value inside it, as a path; may be empty.
        found: the value in the judged run.
        expected: the value in the reference run.
        event: the kind of record that shows it: ``step``, ``checkpoint``, ``resumed`` or ``end``.
        launch: the launch of the judged run that shows it; 0 is before any kill.
        others: the other components that differ in the same record.
    """

    step: int
    rank: int
    component: str
    leaf: str
    found: str
    expected: str
    event: str
    launch: int
    others: tuple[str, ...] = ()

    @property
    def slot(self) -> str:
        """The part of the component's key before the first ``/``."""
        return self.component.split("/", 1)[0]

    def __str__(self) -> str:
        name = f"{self.component}: {self.leaf}" if self.leaf else self.component
        return (
            f"step {self.step}, rank {self.rank}: {name} differs "
            f"(found {_short(self.found)}, expected {_short(self.expected)})"
        )


@dataclass(frozen=True)
class Resume:
    """One launch that continued an earlier one, as rank 0 saw it.

    Args:
        launch: its number; launch 0 is the first.
        step: the last step it did not have to train.
        num_repeated_steps: steps that an earlier launch had trained and this one trained again.
    """

    launch: int
    step: int
    num_repeated_steps: int


@dataclass(frozen=True)
class Verdict:
    """Whether a run that was killed and resumed is, bit for bit, the run that never was.

    Args:
        exact: every execution of every step, every state and the end are equal; under a tolerance
            what it lets through is not a difference.
        divergence: the first difference; None when exact.
        num_steps: steps of the reference run.
        num_ranks: ranks of the reference run.
        resumes: the launches that resumed.
        own_values: values that differ from the reference from the start, never change, and were
            restored after every kill, such as the state of a generator that is neither seeded nor
            drawn from.
        firsts: the first divergence of each component, in the order in which they were found.
        notes: what a reader must know of how launches were aligned.
        tolerance: the relative difference that values may have; None: every bit is compared.
        with_resumekit: a callback was attached to the judged run, and none to the reference.
        is_changed_by_attaching: they differ before the first kill, and two runs without a callback
            do not.
    """

    exact: bool
    divergence: Divergence | None
    num_steps: int
    num_ranks: int
    resumes: tuple[Resume, ...]
    own_values: tuple[str, ...] = ()
    firsts: tuple[Divergence, ...] = ()
    notes: tuple[str, ...] = ()
    tolerance: float | None = None
    with_resumekit: bool = False
    is_changed_by_attaching: bool = False

    @property
    def num_resumes(self) -> int:
        """How many launches continued an earlier one."""
        return len(self.resumes)

    @property
    def is_reproducible(self) -> bool:
        """False when the two runs differ before the first kill: no resume can be blamed for it."""
        before = self.divergence is not None and self.divergence.launch == 0
        return self.is_changed_by_attaching or not before

    @property
    def is_restart(self) -> bool:
        """Whether a launch did not continue from the weights of this run at all."""
        one = self.divergence
        return one is not None and (one.component, one.leaf) == (RUN, WEIGHTS)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a JSON report."""
        return asdict(self)

    def __str__(self) -> str:
        attached = " with resumekit attached" if self.with_resumekit else ""
        if self.divergence is None:
            plural = "" if self.num_resumes == 1 else "s"
            done = f"{self.num_steps} steps, {self.num_resumes} resume{plural}"
            if self.tolerance is not None:
                within = f"EQUAL WITHIN {self.tolerance:g}{attached}"
                return f"{within}: {done}; weights are not compared; {_NOT_TRIED}"
            equal = f"EXACT{attached}: {done}, every bit equal"
            if self.with_resumekit:
                equal += " to the uninterrupted run without it"
            names = ", ".join(name for name in self.own_values if not _is_generator(name))
            constants = f" (each run has its own constant {names})" if names else ""
            return f"{equal}{constants}; {_NOT_TRIED}"
        if not self.is_reproducible:
            return (
                f"NOT REPRODUCIBLE: {self.divergence}. The two runs differ before the first kill; "
                "seed the script and make its operations deterministic"
            )
        if self.is_restart:
            found = f"launch {self.divergence.launch}, rank {self.divergence.rank}"
            return f"WEIGHTS RESTARTED{attached}: {found}: {self.divergence.found}"
        within = "" if self.tolerance is None else f" (tolerance of values {self.tolerance:g})"
        diverged = f"DIVERGED{attached}{within}: {self.divergence}"
        if self.is_changed_by_attaching:
            diverged += (
                ". It differs before the first kill, and two runs without resumekit are equal: "
                "attaching changes this script"
            )
        return diverged


def describe(value: Any) -> str:
    """A short text of a recorded value; hexadecimal floats get their decimal beside them."""
    if isinstance(value, str) and value.lstrip("-").startswith("0x"):
        return f"{float.fromhex(value):.9g} = {value}"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:60]}… ({len(text)} characters)"


def _is_generator(name: str) -> bool:
    """Whether a constant value is the state of a generator that nobody draws from."""
    return not _GENERATORS.isdisjoint(re.split(r"[^a-z]+", name))


def _short(text: str) -> str:
    """A digest cut to what a reader compares; everything else as it is."""
    is_digest = len(text) >= 24 and all(letter in "0123456789abcdef" for letter in text)
    return f"{text[:12]}…" if is_digest else text


class Outcome(str, Enum):
    """The answer of one trial."""

    EXACT = "exact"  # the killed run is the uninterrupted one
    WITHIN_TOLERANCE = "within the tolerance"  # the same, but for small differences of values
    DIVERGED = "diverged"  # it is not
    RESTARTED = "weights restarted"  # a relaunch did not continue from the run's weights
    NOT_REPRODUCIBLE = "not reproducible"  # the two differ before the first kill
    FAILED = "failed"  # a relaunch after a kill failed
    CAUGHT = "caught"  # a component was left out, and the verdict names it
    MISNAMED = "misnamed"  # it was left out, and the verdict names something else
    MISSED = "missed"  # it was left out, and nobody noticed
    NO_EFFECT = "no effect"  # the same, and it never held anything but its first state


_GOOD = frozenset({Outcome.EXACT, Outcome.WITHIN_TOLERANCE, Outcome.CAUGHT, Outcome.NO_EFFECT})


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
        at: the chosen point at which it was to be killed; None for a random instant.
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

    @property
    def end(self) -> str:
        """How it ended, in words."""
        if self.was_killed:
            return f"SIGKILL {self.where}"
        return "by itself" if self.exit_status == 0 else f"exit status {self.exit_status}"


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
        recorded: the comparison of what the recorder saw; None when it saw no step, or failed.
        recorder_failure: why the recorder stopped; empty when it did not.
        causes: each component that differs first, with its likely cause and what that rests on;
            empty without a difference, and where a launch failed.
    """

    injected: str | None
    outcome: Outcome
    verdict: Verdict | None
    failure: str
    launches: tuple[LaunchSummary, ...]
    num_left_behind: int
    digests: Mapping[str, str]
    recorded: Verdict | None = None
    recorder_failure: str = ""
    causes: tuple[str, ...] = ()

    @property
    def num_kills(self) -> int:
        """How many kills hit: a run may be over before the last ones."""
        return sum(launch.was_killed for launch in self.launches)

    @property
    def seconds(self) -> float:
        """The wall-clock time of all launches together."""
        return sum(launch.seconds for launch in self.launches)

    @property
    def resumes(self) -> Mapping[int, Resume]:
        """The launches that continued an earlier one, by number."""
        return {one.launch: one for one in self.verdict.resumes} if self.verdict else {}


@dataclass(frozen=True)
class ProveResult:
    """The whole answer.

    Args:
        command: as the user wrote it.
        world: ranks.
        at: the chosen points of the kills; empty when they were random instants.
        seed: what the random instants were drawn from; None when there were none.
        num_kills_asked: kills per trial.
        num_steps: steps of the uninterrupted run.
        reference_seconds: its wall-clock time.
        reference_digests: one digest per component of its last state.
        trials: the plain trial, or one for each injected component.
        is_recorded: the steps were counted and compared by the recorder, not by the script's trace.
        save_every: of the attached callback; None: none was attached.
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
    is_recorded: bool = False
    save_every: int | str | None = None

    @property
    def ok(self) -> bool:
        """Exact; or, with injections, each of them caught and named."""
        return all(trial.outcome in _GOOD for trial in self.trials)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a JSON report."""
        return {"ok": self.ok, "with_resumekit": self.save_every is not None, **asdict(self)}
