"""What a run recorded, as plain values, when it had a value, and where another run differs.

``of_trace`` makes it from the trace of ``prove``; the page about a replay makes the same from the
journals of a run and of its replay.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from resumekit.errors import TraceError
from resumekit.prove.trace_records import (
    CHECKPOINT,
    END,
    ORIGIN,
    RESUMED,
    STEP,
    Attempt,
    Record,
    read_trace,
)
from resumekit.serialization import leaf_digests

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

# The recorder finds these when it looks for them; that one is absent shows nothing.
FOUND_BY_CHANCE = ("modules", "grad_scaler")

Parts = Mapping[str, Mapping[str, str]]

# As found and expected; None where it is absent.
Leaves = Mapping[str, tuple[str | None, str | None]]


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

    @property
    def epoch(self) -> str | int | None:
        """Of a step: its epoch, or the pass over the dataset that the recorder saw."""
        return self.parts.get(DATA, {}).get("epoch", self.facts.get("data_pass"))


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


def read_recordings(trace: Path) -> dict[int, Recording]:
    """What each rank traced, by rank; empty when nothing was."""
    try:
        return {rank: of_trace(attempts) for rank, attempts in read_trace(trace).items()}
    except TraceError:
        return {}


def of_trace(attempts: Iterable[Attempt]) -> Recording:
    """What one rank traced, or what the recorder saw of it.

    Args:
        attempts: of one rank, as ``read_trace`` gives them.
    """
    kinds = (STEP, CHECKPOINT, RESUMED, END, ORIGIN)
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
    if kind == ORIGIN:
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


class History:
    """When the reference run had a value."""

    def __init__(self, reference: Recording) -> None:
        self.moments = {each.key: each for each in reversed(reference.moments)}
        self.steps = [each for each in reference.moments if each.kind == STEP]
        self.first_step = min((each.step for each in self.steps), default=0)
        self._steps_with: dict[tuple[bool, str, str, str], list[int]] = defaultdict(list)
        for moment in reference.moments:
            for component, leaves in moment.parts.items():
                for leaf, text in leaves.items():
                    at = moment.kind == STEP, component, leaf, text
                    self._steps_with[at].append(moment.step)
        num_values = Counter(at[:3] for at in self._steps_with)
        # The leaves that have one value in the whole run.
        self.constants = frozenset(at for at, number in num_values.items() if number == 1)

    def steps_with(self, moment: Moment, component: str, leaf: str) -> list[int]:
        """The steps at which the reference had the value that a leaf has in this moment."""
        text = moment.parts.get(component, {}).get(leaf, "")
        is_step = moment.kind in (STEP, RESTORED)
        return self._steps_with.get((is_step, component, leaf, text), [])

    def expected(self, moment: Moment) -> Moment | None:
        """The moment of the reference that one of another run must be equal to."""
        if moment.kind == RESTORED:
            return self._before(moment)
        found = self.moments.get(moment.key)
        return _rest_of(found, moment) if found and moment.facts.get("is_rest") else found

    def _before(self, restored: Moment) -> Moment | None:
        """What the reference had where a launch has restored its state; None: it is not known."""
        parts: dict[str, Mapping[str, str]] = {}
        for component in restored.parts:
            after = (each for each in reversed(self.steps) if each.step <= restored.step)
            found = next((each.parts[component] for each in after if component in each.parts), None)
            if found is not None:
                parts[component] = {k: v for k, v in found.items() if not is_setting(k)}
        return Moment(RESTORED, restored.step, parts) if parts else None

    def distance(self, moment: Moment, generator: str, step: int) -> int | None:
        """The draws by which a generator is ahead of where it was after a step of the reference.

        None where the recorder saw other words, and they cannot be counted.
        """
        then = self.moments.get((True, step, 0))
        now, there = (
            one.facts.get("rng_positions", {}).get(generator) if one else None
            for one in (moment, then)
        )
        if now is None or there is None or now[0] != there[0]:
            return None
        return int(now[1]) - int(there[1])

    def first_step_of_epoch(self, step: int) -> int | None:
        """The first step of the epoch that a step is in; None: it is not known."""
        moment = self.moments.get((True, step, 0), Moment(STEP, step, {}))
        batch = moment.parts.get(DATA, {}).get("batch", "")
        if batch.isdigit():
            return step - int(batch)
        epochs = {each.step: each.epoch for each in self.steps if each.epoch is not None}
        return min((each for each in epochs if epochs[each] == moment.epoch), default=None)


def differences(moment: Moment, expected: Moment) -> dict[str, Leaves]:
    """By component, the values that two moments do not have in common, inputs of a step first."""
    found: dict[str, Leaves] = {}
    for component in {**moment.parts, **expected.parts}:
        is_common = component in moment.parts and component in expected.parts
        is_by_chance = moment.kind == STEP and component.split("/")[0] in FOUND_BY_CHANCE
        if is_common or not (is_by_chance or moment.kind == RESTORED):
            now, then = moment.parts.get(component, {}), expected.parts.get(component, {})
            values = {leaf: (now.get(leaf), then.get(leaf)) for leaf in {**then, **now}}
            found[component] = {leaf: (a, b) for leaf, (a, b) in values.items() if a != b}
    return found


@dataclass(frozen=True, eq=False)
class Case:
    """The first difference of one component in a launch.

    Args:
        component: which one.
        leaves: each leaf that differs, as found and expected; None for an absent one.
        moment: of the judged run.
        expected: the same moment of the reference run.
        history: of the reference run.
        launch: the moments of the launch.
        number: of the launch.
        cases: all of the launch, by component.
    """

    component: str
    leaves: Leaves
    moment: Moment
    expected: Moment
    history: History
    launch: Launch
    number: int
    cases: Mapping[str, Case]

    @property
    def slot(self) -> str:
        """The part of the key before the first slash."""
        return self.component.split("/")[0]

    @property
    def topic(self) -> str:
        """The key of its rows in the table of causes: the slot, or a more specific one."""
        if self.component in self.moment.values:
            return "result"
        if self.component.split("/")[-1] == "gradients":
            return "gradients"
        if self.moment.kind == STEP and self.component == DATA:
            return "batch"
        if self.slot == "modules" and any(leaf.endswith("n_averaged") for leaf in self.before):
            return "averaged modules"
        return self.slot

    @property
    def before(self) -> Mapping[str, str]:
        """What the reference run had of the component."""
        return self.expected.parts.get(self.component, {})

    @property
    def resumed(self) -> int:
        """The last step that the launch did not have to train."""
        first = next((each for each in self.launch if each.kind in (RESUMED, STEP)), self.moment)
        return first.step if first.kind == RESUMED else first.step - 1

    @property
    def fresh(self) -> int:
        """The step of the reference with as many steps done as this launch has done."""
        return self.history.first_step + self.moment.step - self.resumed - 1

    def steps_with(self, leaf: str) -> list[int]:
        """When the reference had what this leaf has now."""
        return self.history.steps_with(self.moment, self.component, leaf)

    @cached_property
    def common_steps(self) -> list[int]:
        """When the reference had all values that differ now."""
        return sorted(set.intersection(*(set(self.steps_with(leaf)) for leaf in self.leaves)))

    def nearest(self, steps: Sequence[int]) -> int:
        """The step that is nearest to its own; its own without any."""
        step = self.moment.step
        return min(steps, key=lambda each: abs(each - step), default=step)

    def cases_before(self) -> list[Case]:
        """All until the step of the case, without results of the step."""
        until = [each for each in self.cases.values() if each.moment.step <= self.moment.step]
        return [each for each in until if each.component not in self.moment.values]

    @cached_property
    def state(self) -> Leaves:
        """The leaves of an optimizer without the settings of its param groups."""
        return {leaf: each for leaf, each in self.leaves.items() if self.is_state(leaf)}

    def is_state(self, leaf: str) -> bool:
        """Whether a leaf of an optimizer is no setting of a param group."""
        is_recorded = self.moment.kind in (STEP, RESTORED)
        return leaf.startswith("state") or (is_recorded and not is_setting(leaf))

    def is_part(self) -> bool:
        """Whether an optimizer has the right state for some parameters, and not for others."""
        every = {leaf.rpartition(".")[0] for leaf in self.before if self.is_state(leaf)}
        return len({leaf.rpartition(".")[0] for leaf in self.state}) < len(every)


def first_differences(
    history: History,
    saved: Mapping[tuple[bool, int, int], Moment],
    launch: Launch,
    number: int,
    ignored: frozenset[tuple[bool, str, str]],
) -> list[Case]:
    """The first difference of each component in a launch.

    Args:
        history: of the reference run.
        saved: the checkpoints of the launches before, which count where the reference has none.
        launch: that is judged.
        number: of the launch.
        ignored: leaves that are not compared.
    """
    cases: dict[str, Case] = {}
    for moment in launch:
        expected = history.expected(moment) or saved.get(moment.key)
        if expected is None:
            continue
        for component, values in differences(moment, expected).items():
            at = moment.kind == STEP, component
            leaves = {leaf: each for leaf, each in values.items() if (*at, leaf) not in ignored}
            if leaves and component not in cases:
                context = moment, expected, history, launch, number, cases
                cases[component] = Case(component, leaves, *context)
    return list(cases.values())


def is_setting(leaf: str) -> bool:
    """Whether a leaf of an optimizer is a number of a param group, not a part of its state."""
    return re.fullmatch(r"(param_groups\[\d+\]|group\d+)\.[a-z_]\w*(\[\d+\])?", leaf) is not None


def _rest_of(expected: Moment, rest: Moment) -> Moment:
    """The last micro-steps of a step, of which another launch has made the first ones."""
    parts: dict[str, Mapping[str, str]] = dict(expected.parts)
    now, then = rest.parts.get(DATA, {}), parts.get(DATA, {})
    parts[DATA] = {leaf: _last(text, now.get(leaf, "")) for leaf, text in then.items()}
    values = [parts.pop(name) for name in expected.values]
    kept = values[len(values) - len(rest.values) :]
    parts.update(zip(rest.values, kept, strict=False))
    return replace(expected, parts=parts, values=rest.values)


def _last(expected: str, found: str) -> str:
    return ",".join(expected.split(",")[-len(found.split(",")) :]) if found else expected
