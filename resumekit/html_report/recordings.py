"""What a run recorded, as plain values that two runs can be compared by.

``of_trace`` makes it from the trace of ``prove``; ``journal_recordings.of_replay`` makes the same
from the journals of a run and of its replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from resumekit.prove import Attempt, Record
from resumekit.serialization import leaf_digests

STEP, RESUMED = "step", "resumed"

# Of the recorder: weights and optimizer state before the first step of a launch.
RESTORED = "restored"

DATA, LR, RNG = "data", "lr", "rng"
INPUTS = (DATA, LR, RNG)
IN_ANY_ORDER = "samples in any order"  # of data, where only digests of the ids are known

# Of the recorder: how a launch was aligned; the digest of the weights and the counter of the
# optimizer before a step; which pass over a loader its batch is from; where the generators are in
# their sequences; whether the step was begun by another launch.
_FACTS = ("by", "weights", "counter", "data_pass", "rng_positions", "is_rest")

_MAX_DECODED = 20_000  # integers whose digests are known; more take seconds

Parts = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Moment:
    """One step that was executed, or one state that was saved, restored or reached.

    Args:
        kind: ``"step"``, ``"checkpoint"``, ``"resumed"``, ``"end"`` or ``"restored"``.
        step: the optimizer step.
        parts: by component, and in it by leaf, a text that is equal exactly when the value is. A
            step has ``data`` (``epoch``, ``batch``, ``samples``), ``lr`` and ``rng``.
        values: the components that are results of the step, such as the loss.
        micro_step: distinguishes several states of one step.
        facts: what helps to explain a difference, and is none: see ``_FACTS``.
    """

    kind: str
    step: int
    parts: Parts = field(repr=False)
    values: tuple[str, ...] = ()
    micro_step: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def key(self) -> tuple[bool, int, int]:
        """Equal for the moments of two runs that must be equal."""
        return self.kind == STEP, self.step, self.micro_step


Launch = tuple[Moment, ...]


@dataclass(frozen=True)
class Recording:
    """All launches of one rank of a run.

    Args:
        launches: by their number, in the order of execution.
        was_ended: after the steps that were asked for, as a replay is.
    """

    launches: Mapping[int, Launch]
    was_ended: bool = False

    @property
    def moments(self) -> Launch:
        """All moments, in the order of execution."""
        return tuple(moment for launch in self.launches.values() for moment in launch)

    @property
    def last_step(self) -> int:
        """The highest step that was executed."""
        return max((each.step for each in self.moments if each.kind == STEP), default=0)


def of_trace(attempts: Iterable[Attempt]) -> Recording:
    """What one rank traced, or what the recorder saw of it.

    Args:
        attempts: of one rank, as ``read_trace`` gives them.
    """
    kinds = (STEP, "checkpoint", RESUMED, "end", "origin")
    return Recording(
        {
            attempt.launch: tuple(_moment(each) for each in attempt.records if each.kind in kinds)
            for attempt in attempts
        }
    )


def first_step(launch: Launch) -> Moment | None:
    """The first step that a launch executed; None if there is none."""
    return next((each for each in launch if each.kind == STEP), None)


def losses(launch: Launch, name: str = "loss") -> tuple[tuple[float, float], ...]:
    """A result by step, where it is a number."""
    found: dict[int, float] = {}
    for moment in launch:
        text = moment.parts.get(name, {}).get("") if name in moment.values else None
        if moment.kind == STEP and text is not None:
            try:
                found[moment.step] = _number(text)
            except ValueError:
                continue  # a digest, of a tensor with several values
    return tuple(sorted((float(step), value) for step, value in found.items()))


def _number(text: str) -> float:
    return float.fromhex(text) if "0x" in text else float(text)


def _moment(record: Record) -> Moment:
    fields = record.fields
    parts: dict[str, dict[str, str]] = {}
    if record.kind == STEP:
        data = {name: str(fields[name]) for name in ("epoch", "batch") if name in fields}
        if "samples" in fields:
            data["samples"] = ",".join(map(str, fields["samples"]))
        if "sample_counts" in fields:
            data["count"] = ",".join(map(str, fields["sample_counts"]))
        if all(fields.get("sample_sets", ("",))):
            data[IN_ANY_ORDER] = ",".join(fields["sample_sets"])
        rates = {f"group{index}": str(lr) for index, lr in enumerate(fields.get("lr", ()))}
        parts = {DATA: data, LR: rates, RNG: dict(record.rng)}
    known = _known_digests()
    for component, leaves in record.components.items():
        parts[component] = {leaf: known.get(text, text) for leaf, text in leaves.items()}
    values = {name: {"": str(value)} for name, value in fields.get("values", {}).items()}
    kind, step = record.kind, record.step
    if kind == "origin":
        kind, step = RESTORED, step - 1
    facts = {name: fields[name] for name in _FACTS if name in fields}
    return Moment(kind, step, {**parts, **values}, tuple(values), record.micro_step[1], facts)


@cache
def _known_digests() -> Mapping[str, str]:
    """Plain values by their digests, so that counters and empty states can be read."""
    plain: dict[str, Any] = {
        **{str(number): number for number in range(_MAX_DECODED)},
        **{"None": None, "{}": {}, "[]": [], "0.0": 0.0, "1.0": 1.0, "False": False, "True": True},
    }
    return {digest: text for text, digest in leaf_digests(plain).items()}
