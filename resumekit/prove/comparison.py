"""The verdict on a run that was killed and resumed, against the trace of one that never was.

Every execution of every step is judged, also one that a later resume repeated: each of them is
determined to the bit by the reference run. Besides, the logical run (the last execution of each
step) must be complete, and at least one launch must have resumed.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from resumekit.prove.result import RUN, WEIGHTS, Divergence, Resume, Verdict, describe
from resumekit.record.moments import (
    CHECKPOINT,
    DATA,
    END,
    INPUTS,
    ORIGIN,
    RESUMED,
    RNG,
    STATE_KINDS,
    STEP,
    Leaves,
    Moment,
    TracedProcess,
    differences,
    durable_steps,
    read_trace,
    records_of,
    rest_of,
    steps_of,
)

_STATE_ORDER = (
    "model",
    "parameters",
    "buffers",
    "optimizer",
    "lr_scheduler",
    "grad_scaler",
    "ema",
    "modules",
    "data",
    "progress",
    "best_metric",
    "callbacks",
    "extras",
    "rng",
    "gradient_buckets",  # of DDP; a validation that should not run shows here, too
)

# The recorder sees these when it looks at the right moment; absence shows nothing.
_OFTEN_ABSENT = ("modules/", "grad_scaler")

# Of a step; what else its data has follows from these.
_POSITION = ("epoch", "batch", "samples")

# A component, the first leaf in it that differs, and its values as found and expected.
Difference = tuple[str, str, str, str]


def _is_close(leaves: Leaves, tolerance: float) -> bool:
    """Whether the only leaf is a number that differs by no more than this."""
    found, expected = leaves.get("", (None, None))
    if found is None or expected is None or "0x" not in found or "0x" not in expected:
        return False
    return isclose(float.fromhex(found), float.fromhex(expected), rel_tol=tolerance)


def _texts(found: Any, expected: Any) -> tuple[str, str]:
    """Both values; of two long lists the first elements that differ."""
    if isinstance(found, list) and isinstance(expected, list) and len(str(expected)) > 60:
        pairs = zip(found, expected, strict=False)
        index = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if index is not None:
            return f"{found[index]} at position {index}", f"{expected[index]}"
    return describe(found), describe(expected)


def _slot_order(component: str) -> tuple[int, str]:
    slot = component.split("/", 1)[0]
    if component.endswith("/gradient_buckets"):
        slot = "gradient_buckets"
    index = _STATE_ORDER.index(slot) if slot in _STATE_ORDER else len(_STATE_ORDER)
    return index, component


def _is_model(component: str) -> bool:
    return component.split("/", 1)[0] in ("model", "ema", "parameters", "buffers", "modules")


Leaf = tuple[str, str]
_Key = TypeVar("_Key")

# Never weights or anything that is computed from them.
_SLOTS = frozenset({"rng", "data", "callbacks", "extras"})


def idle_generators(processes: Iterable[TracedProcess]) -> frozenset[str]:
    """The names of the generators whose state never changes from step to step."""
    records = records_of(processes, STEP)
    return _constant(pair for record in records for pair in record.parts[RNG].items())


def constant_leaves(processes: Iterable[TracedProcess]) -> frozenset[Leaf]:
    """The leaves, outside the weights, that have one value in every state of a run."""
    records = records_of(processes, *STATE_KINDS)
    return _constant(pair for record in records for pair in _own_leaves(record))


def constant_components(processes: Iterable[TracedProcess]) -> frozenset[str]:
    """The keys of the components that have one state in every checkpoint of a run."""
    records = records_of(processes, CHECKPOINT)
    states = (item for record in records for item in record.components.items())
    return _constant((key, json.dumps(leaves, sort_keys=True)) for key, leaves in states)


def _constant(pairs: Iterable[tuple[_Key, str]]) -> frozenset[_Key]:
    """The keys that have one value in all pairs."""
    seen: dict[_Key, set[str]] = {}
    for key, value in pairs:
        seen.setdefault(key, set()).add(value)
    return frozenset(key for key, values in seen.items() if len(values) == 1)


def values_before_the_first_kill(processes: Sequence[TracedProcess]) -> dict[Leaf, str]:
    """The values in the first checkpoint of a run.

    Where the run was killed before that was recorded, only the steps confirm what was restored: of
    generators that have one state in all of them.
    """
    first = next(records_of(processes, RESUMED, CHECKPOINT), None)
    values = {} if first is None else dict(_own_leaves(first))
    if first is None or first.kind == CHECKPOINT:
        return values
    idle = idle_generators(processes) if any(records_of(processes[:1], STEP)) else frozenset()
    of_generators = ((leaf, each) for leaf, each in values.items() if leaf[0] in (RNG, DATA))
    return {leaf: each for leaf, each in of_generators if idle & {*re.split("[^a-z]+", leaf[1])}}


def with_own_values(expected: Moment, own_values: Mapping[Leaf, str]) -> Moment:
    """The expected state of the reference, some leaves taken from the judged run."""
    parts = {
        key: {leaf: own_values.get((key, leaf), digest) for leaf, digest in leaves.items()}
        for key, leaves in expected.parts.items()
    }
    return replace(expected, parts=parts)


def last_digests(
    processes: Iterable[TracedProcess], *, excluded: frozenset[Leaf]
) -> dict[str, str]:
    """One digest per component of the newest state that a run traced.

    Args:
        processes: what one rank wrote.
        excluded: constant leaves, whose value may differ between runs.
    """
    states = [record.components for record in records_of(processes) if record.components]
    digests: dict[str, str] = {}
    for key, leaves in (states[-1] if states else {}).items():
        kept = {leaf: digest for leaf, digest in leaves.items() if (key, leaf) not in excluded}
        text = json.dumps(kept, sort_keys=True)
        digests[key] = xxhash.xxh3_64_hexdigest(text.encode())
    return digests


def _own_leaves(record: Moment) -> Iterable[tuple[Leaf, str]]:
    for key, leaves in record.parts.items():
        if key.split("/", 1)[0] in _SLOTS:
            for leaf, digest in leaves.items():
                yield (key, leaf), digest


# ---------------------------------------------------------------- two traces

StepKey = tuple[int, int]

# Step and micro-step: a save may be made inside an accumulation window.
MicroStep = tuple[int, int]

# By how such a launch was aligned: part of its weights may be those of the step that was counted.
_WEIGHTS_OF_NO_STEP = {"nothing": (RUN, WEIGHTS), "counter": ("parameters", "")}

# Where two records of one step differ, the earlier one in the life of a step is the cause.
_ORDER = {ORIGIN: 0, STEP: 0, CHECKPOINT: 1, RESUMED: 2, END: 3}


def compare(
    reference: Path,
    candidate: Path,
    *,
    expect_resume: bool = True,
    last_launch: int | None = None,
    tolerance: float | None = None,
) -> Verdict:
    """The verdict on a run that was killed and resumed, against one that was never killed.

    Args:
        reference: the trace of the uninterrupted run.
        candidate: the trace of all launches of the other run.
        expect_resume: whether a candidate that never resumed is a divergence; False where nobody
            killed it.
        last_launch: the number of the last launch of the candidate: it is to blame when something
            was never done. Without it, that is the last one that traced anything.
        tolerance: the largest relative difference of a loss or another value, for operations that
            do not repeat; states are then not compared.

    Raises:
        TraceError: one of the traces is missing or damaged.
    """
    expected = read_trace(reference)
    found = read_trace(candidate)
    divergences: list[Divergence] = []
    firsts: dict[str, Divergence] = {}
    own_values: dict[str, None] = {}
    for rank, processes in expected.items():
        judged = found.get(rank, ())
        judge = _RankJudge(rank, processes, judged, tolerance)
        own_values.update(dict.fromkeys(judge.own_values()))
        divergences += judge.divergences(firsts)
        divergences += judge.missing_parts(last_launch)
    divergences += [_extra_rank(rank) for rank in found if rank not in expected]
    first_rank = min(expected)
    resumes = _resumes(found.get(first_rank, ()))
    if expect_resume and not resumes:
        divergences.append(_never_resumed(first_rank, found.get(first_rank, ())))
    divergence = min(divergences, key=_precedence, default=None)
    return Verdict(
        exact=divergence is None,
        divergence=divergence,
        num_steps=len({step for step, _ in _logical_run(expected[first_rank]).steps}),
        num_ranks=len(expected),
        resumes=resumes,
        own_values=tuple(own_values),
        firsts=tuple(firsts.values()),
        notes=tuple(_notes(found)),
        tolerance=tolerance,
    )


@dataclass
class _LogicalRun:
    """The last execution of each step of one rank."""

    steps: dict[StepKey, Moment] = field(default_factory=dict)
    checkpoints: dict[MicroStep, list[Moment]] = field(default_factory=dict)
    end: Moment | None = None

    def rewind(self, step: int) -> None:
        """Forgets what was done after a step: another execution begins there."""
        self.steps = {key: record for key, record in self.steps.items() if key[0] <= step}
        self.checkpoints = {at: record for at, record in self.checkpoints.items() if at[0] <= step}
        self.end = None

    def add(self, record: Moment, ordinal: int) -> None:
        if record.kind == STEP:
            self.steps[record.step, ordinal] = record
        elif record.kind == CHECKPOINT:
            self.checkpoints.setdefault(record.key[1:], []).append(record)
        elif record.kind == END:
            self.end = record


def _logical_run(processes: Iterable[TracedProcess]) -> _LogicalRun:
    run = _LogicalRun()
    for process in processes:
        begun = False
        for record, ordinal in _with_ordinals(process):
            if record.kind == RESUMED:
                run.rewind(record.step)
                begun = True
            elif not begun and record.kind == STEP:
                run.rewind(record.step - 1)
                begun = True
            run.add(record, ordinal)
    return run


def _with_ordinals(process: TracedProcess) -> Iterator[tuple[Moment, int]]:
    """The records of one process; a step record with its ordinal among those of its step."""
    counts: Counter[int] = Counter()
    for record in process.records:
        if record.kind == RESUMED:
            counts.clear()
        yield record, counts[record.step]
        counts[record.step] += record.kind == STEP


class _RankJudge:
    """Holds what one rank of a run has done against what the same rank of the reference did.

    Args:
        rank: which one.
        reference: its processes in the uninterrupted run.
        candidate: those in the judged run, in the order of the launches.
        tolerance: see ``compare``.
    """

    def __init__(
        self,
        rank: int,
        reference: tuple[TracedProcess, ...],
        candidate: tuple[TracedProcess, ...],
        tolerance: float | None,
    ) -> None:
        self._rank, self._candidate, self._tolerance = rank, candidate, tolerance
        self._run = _logical_run(reference)
        self._idle_generators = idle_generators(reference)
        constant = constant_leaves(reference)
        own_values = values_before_the_first_kill(candidate).items()
        self._own_values = {leaf: value for leaf, value in own_values if leaf in constant}
        self._own_checkpoints: dict[MicroStep, Moment] = {}

    def _differences(self, record: Moment, ordinal: int) -> list[Difference]:
        """What is wrong with one record."""
        if record.kind == STEP:
            expected = self._run.steps.get((record.step, ordinal))
            if expected is None:
                return [(RUN, "", "trained", "no such step")]
            return self._described(record, expected)
        if record.kind == END:
            end = self._run.end
            if end is None or end.step != record.step:
                there = "no end" if end is None else f"the end at step {end.step}"
                return [(RUN, "end", f"the end at step {record.step}", there)]
            return self._state_differences(record, end)
        if record.kind == ORIGIN and record.fields["by"] in _WEIGHTS_OF_NO_STEP:
            component, leaf = _WEIGHTS_OF_NO_STEP[record.fields["by"]]
            return [(component, leaf, "weights of no step of this run", "those of a step")]
        if record.kind not in STATE_KINDS:
            return []
        # Where the end of an epoch could not be foreseen, one micro-step has two checkpoints: the
        # one that was due, and the one that records the end.
        all_expected = self._run.checkpoints.get(record.key[1:])
        if all_expected:
            return min((self._state_differences(record, each) for each in all_expected), key=len)
        # A save by time may fall on another step in the reference run. What was resumed is then
        # compared with what this run itself had saved.
        saved = self._own_checkpoints.get(record.key[1:])
        if saved is None or record.kind == CHECKPOINT:
            return []
        return self._described(record, saved)

    def _described(self, found: Moment, expected: Moment) -> list[Difference]:
        """What differs between two states, or between two executions of one step.

        States are in the order of the slots. Of a step, the inputs come first (data, learning rate,
        random numbers), then states, then the values that the step gave. Among the states, equal
        values mean that the forward pass was right and the update was not, so the model comes last;
        otherwise it comes first. Under a tolerance states are not compared.
        """
        expected = rest_of(expected, found)
        is_step = found.kind == STEP
        inputs = INPUTS if is_step else ()
        results = [*dict.fromkeys([*expected.values, *found.values])]
        every = dict(differences(found, expected))
        if is_step:
            data, rng, idle = every.get(DATA, {}), every.get(RNG, {}), self._idle_generators
            every[DATA] = {leaf: data[leaf] for leaf in _POSITION if leaf in data}
            every[RNG] = {name: each for name, each in rng.items() if name not in idle}
        if self._tolerance is not None:  # of a digest nothing is known but whether it is equal
            kept = {name: every[name] for name in (*inputs, *results) if name in every}
            every = {n: each for n, each in kept.items() if not _is_close(each, self._tolerance)}
        every = {name: each for name, each in every.items() if each}
        is_model_last = is_step and every.keys().isdisjoint(results)

        def order(component: str) -> tuple[int, bool, int, str]:
            if component in inputs:
                return 0, False, inputs.index(component), ""
            if component in results:
                return 2, False, results.index(component), ""
            return 1, is_model_last and _is_model(component), *_slot_order(component)

        described: list[Difference] = []
        for name in sorted(every, key=order):
            leaf, values = next(iter(every[name].items()))
            is_common = name in found.parts and name in expected.parts
            if name == DATA and is_step:
                now, then = _texts(found.fields.get(leaf), expected.fields.get(leaf))
            elif is_common or name in results:
                now, then = ("absent" if each is None else describe(each) for each in values)
            elif name.startswith(_OFTEN_ABSENT):
                continue
            else:
                leaf = ""
                now, then = (
                    "present" if name in each.parts else "absent" for each in (found, expected)
                )
            described.append((name, leaf, now, then))
        return described

    def own_values(self) -> list[str]:
        """The names of the values that the judged run is compared with itself for."""
        first = next(iter(self._run.checkpoints.values()), None)
        leaves = first[0].components if first else {}
        return [
            f"{key}: {leaf}"
            for (key, leaf), value in self._own_values.items()
            if leaves.get(key, {}).get(leaf) != value
        ]

    def _state_differences(self, record: Moment, expected: Moment) -> list[Difference]:
        return self._described(record, with_own_values(expected, self._own_values))

    def divergences(self, firsts: dict[str, Divergence]) -> Iterator[Divergence]:
        """The first divergence of every launch, in the order in which its records were written.

        What follows it is only its consequence, even where that carries a smaller step: a run that
        lost its progress counts from the start again.

        Args:
            firsts: receives the first divergence of each component.
        """
        for process in self._candidate:
            is_first = True
            for record, ordinal in _with_ordinals(process):
                differences = self._differences(record, ordinal)
                for difference in differences:
                    one = self._divergence(record, process, [difference])
                    firsts.setdefault(one.component, one)
                if differences and is_first:
                    one = self._divergence(record, process, differences)
                    yield _restart(one) if _has_first_weights(process) else one
                    is_first = False
            saved = records_of([process], CHECKPOINT)  # for the launches that follow
            self._own_checkpoints.update({record.key[1:]: record for record in saved})

    def _divergence(
        self, record: Moment, process: TracedProcess, differences: list[Difference]
    ) -> Divergence:
        first, *rest = differences
        others = dict.fromkeys(component for component, *_ in rest if component != first[0])
        where = record.kind, process.launch
        return Divergence(record.step, self._rank, *first, *where, tuple(others))

    def missing_parts(self, last_launch: int | None) -> Iterator[Divergence]:
        """What the reference did and the logical run of the candidate did not."""
        rank, truth, logical = self._rank, self._run, _logical_run(self._candidate)
        launch = last_launch
        if launch is None:
            launch = max((process.launch for process in self._candidate), default=1)
        for step, _ in sorted(truth.steps.keys() - logical.steps.keys())[:1]:
            yield Divergence(step, rank, RUN, "", "never trained", "trained", STEP, launch)
        if truth.end is not None and logical.end is None:
            step = truth.end.step
            yield Divergence(step, rank, RUN, "end", "never reached", "reached", END, launch)
        saved: list[int] = []
        for process in self._candidate:
            trained = steps_of([process], STEP)
            if saved and trained and not steps_of([process], RESUMED):
                found = f"a fresh start at step {trained[0]}"
                expected = f"a resume from the checkpoint of step {max(saved)}"
                yield Divergence(trained[0], rank, RUN, "", found, expected, STEP, process.launch)
            saved += durable_steps([process])


def _has_first_weights(process: TracedProcess) -> bool:
    """Whether a relaunch had the weights of step 1 when it trained its first step."""
    return process.launch > 0 and steps_of([process], ORIGIN)[:1] == [1]


def _restart(divergence: Divergence) -> Divergence:
    others = (divergence.component, *divergence.others)
    found = "weights of step 1" if divergence.leaf != WEIGHTS else divergence.found
    return replace(divergence, component=RUN, leaf=WEIGHTS, found=found, others=others)


def _resumes(processes: tuple[TracedProcess, ...]) -> tuple[Resume, ...]:
    resumes: list[Resume] = []
    newest = first = None
    for process in processes:
        steps = steps_of([process], STEP)
        at = next(iter(steps_of([process], RESUMED)), None)
        if at is None and first is not None and steps and steps[0] > first:
            at = steps[0] - 1  # resumed by the script itself: it continued after the first step
        if at is not None and newest is not None:
            resumes.append(Resume(process.launch, at, max(newest - at, 0)))
        if steps:
            first = steps[0] if first is None else min(first, steps[0])
            newest = max([*steps, newest or 0])
    return tuple(resumes)


def _notes(ranks: Mapping[int, tuple[TracedProcess, ...]]) -> Iterator[str]:
    """What a reader must know of how the launches were aligned."""
    for process in (process for processes in ranks.values() for process in processes):
        for record in records_of([process], ORIGIN):
            how, where = record.fields["by"], f"launch {process.launch}, rank {process.rank}"
            if how == "ambiguous":
                yield f"{where}: its weights are of several steps; compared from step {record.step}"
            elif how == "counter":
                yield f"{where}: compared from step {record.step}, by the optimizer's step counter"


def _never_resumed(rank: int, processes: tuple[TracedProcess, ...]) -> Divergence:
    step = min(steps_of(processes, STEP), default=0)
    if steps_of(processes, ORIGIN):
        found = "weights of step 1"
        return Divergence(step, rank, RUN, WEIGHTS, found, "a resume", ORIGIN, processes[-1].launch)
    found = f"{len(processes)} launches, each from the first step"
    launch = max([1, *(process.launch for process in processes)])
    return Divergence(step, rank, RUN, "", found, "a resume", RESUMED, launch)


def _extra_rank(rank: int) -> Divergence:
    return Divergence(0, rank, RUN, "", "a rank", "no such rank in the reference", STEP, 0)


def _precedence(divergence: Divergence) -> tuple[bool, int, int, int]:
    # A difference before the first kill comes first, whatever its step: it shows that the script
    # does not repeat itself, and no later difference can be blamed on a resume.
    return (
        divergence.launch > 0,
        divergence.step,
        _ORDER[divergence.event],
        divergence.rank,
    )
