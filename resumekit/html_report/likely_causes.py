"""The likely cause of each difference between two recorded runs. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from resumekit.html_report.cause_rules import Cause, cause_of
from resumekit.html_report.recordings import (
    DATA,
    INPUTS,
    LR,
    RESTORED,
    RESUMED,
    RNG,
    STEP,
    Launch,
    Moment,
    Recording,
    first_step,
)
from resumekit.html_report.run_history import FOUND_BY_CHANCE, Case, History, differing

# What an optimizer is found to have lost by itself, whatever the inputs of the step were.
_OF_OPTIMIZER = (
    Cause.OPTIMIZER_COLD,
    Cause.OPTIMIZER_PARTLY,
    Cause.OPTIMIZER_OLDER,
    Cause.OPTIMIZER_SETTINGS,
)


@dataclass(frozen=True)
class Finding:
    """The first difference of one component, with its likely cause.

    Args:
        component: the component, or ``data``, ``lr``, ``rng``, or a result such as ``loss``.
        leaf: the first leaf that differs; may be empty.
        found: its value in the judged run.
        expected: its value in the reference run.
        num_leaves: how many leaves of the component differ.
        moment: where it was seen.
        launch: the launch of the judged run.
        cause: the likely cause.
        evidence: what the cause rests on.
    """

    component: str
    leaf: str
    found: str
    expected: str
    num_leaves: int
    moment: Moment
    launch: int
    cause: Cause
    evidence: str


def find_causes(reference: Recording, judged: Recording) -> tuple[Finding, ...]:
    """The first difference of each component, causes before their consequences.

    Only the first launch with a difference is judged: what later ones do follows from it.

    Args:
        reference: the run that was never stopped.
        judged: the run that was stopped and resumed.
    """
    history = History(reference)
    ignored = _own_constants(history, judged)
    saved: dict[tuple[bool, int, int], Moment] = {}
    past: list[Launch] = []
    for number, launch in judged.launches.items():
        if past:
            restarted = _older_weights(history, launch, number)
            restarted = restarted or _started_again(history, past, launch, number)
            if restarted is not None:
                return (restarted,)
        cases = list(_cases(history, saved, launch, number, ignored))
        gap = _gap(past, launch, number)
        if gap is not None:
            return (gap, *_follow(cases, "the skipped steps"))
        if cases:
            return tuple(_explained(cases) if past else _not_reproducible(cases))
        saved.update({each.key: each for each in launch if each.kind == "checkpoint"})
        past.append(launch)
    return _other_end(reference, judged)


def _own_constants(history: History, judged: Recording) -> frozenset[tuple[bool, str, str]]:
    """Constants of each run, such as the state of a generator that nobody seeds or draws from."""
    first = next(iter(judged.launches.values()), ())
    found = set()
    for moment in first:
        expected = history.moments.get(moment.key)
        for component, leaf in () if expected is None else differing(moment, expected):
            if component.split("/")[0] in (RNG, DATA, "callbacks", "extras"):
                found.add((moment.kind == STEP, component, leaf))
    return frozenset(found & history.constants)


def _cases(
    history: History,
    saved: Mapping[tuple[bool, int, int], Moment],
    launch: Launch,
    number: int,
    ignored: frozenset[tuple[bool, str, str]],
) -> Iterator[Case]:
    seen: set[str] = set()
    for moment in launch:
        expected = history.expected(moment) or saved.get(moment.key)
        if expected is None:
            continue
        leaves: dict[str, dict[str, tuple[str | None, str | None]]] = {}
        for component, leaf in differing(moment, expected):
            if (moment.kind == STEP, component, leaf) not in ignored and component not in seen:
                values = (
                    moment.parts.get(component, {}).get(leaf),
                    expected.parts.get(component, {}).get(leaf),
                )
                leaves.setdefault(component, {})[leaf] = values
        for component, each in leaves.items():
            yield Case(component, each, moment, expected, history, launch, number)
        seen |= leaves.keys()


def _not_reproducible(cases: list[Case]) -> Iterator[Finding]:
    for case in cases:
        yield _finding(case, Cause.NOT_REPRODUCIBLE, "No launch had been stopped before.")


def _explained(cases: list[Case]) -> Iterator[Finding]:
    """Each case with its cause; what another case explains comes last."""
    roots = _roots(cases)
    for case in roots:
        yield _finding(case, *cause_of(case, cases))
    names = ", ".join(dict.fromkeys(each.component for each in roots))
    yield from _follow([each for each in cases if each not in roots], names)


def _follow(cases: list[Case], names: str) -> Iterator[Finding]:
    for case in cases:
        yield _finding(case, Cause.CONSEQUENCE, f"Follows from {names}.")


def _roots(cases: list[Case]) -> list[Case]:
    """The cases of the first moment that differs: what differs later follows from them.

    In a step the inputs come first, then its results, then the state that it leaves. What the step
    does not use is no consequence of other inputs, and neither is a restarted optimizer.
    """
    first = [each for each in cases if each.moment == cases[0].moment]
    kind = first[0].moment.kind
    if kind == RESTORED:  # the weights and the optimizer alone
        step = first_step(first[0].launch)
        others = [each for each in cases if each.moment == step]
        return first + _independent(others, cases)
    if kind != STEP:
        return first
    independent = _independent(first, cases)
    is_scheduled = any(each.component == LR for each in first)  # and other settings with it
    cold = []
    for each in first:
        cause, _ = (Cause.UNKNOWN, "") if each in independent else cause_of(each, cases)
        if cause in _OF_OPTIMIZER and not (is_scheduled and cause is Cause.OPTIMIZER_SETTINGS):
            cold.append(each)
    results = [each for each in first if each.component in each.moment.values]
    return independent + cold or results or first


def _independent(step: list[Case], cases: list[Case]) -> list[Case]:
    """The inputs of a step that differ, and the states that the step neither uses nor changes."""
    found = [each for each in step if each.component in INPUTS or each.slot in FOUND_BY_CHANCE]
    data = next((each for each in found if each.component == DATA), None)
    if data is not None and cause_of(data, cases)[0] is Cause.BATCH_SIZE:
        # A dropout draws as many numbers as the batch needs.
        found = [each for each in found if each.component != RNG]
    return found


def _finding(case: Case, cause: Cause, evidence: str) -> Finding:
    leaf, (found, expected) = next(iter(case.leaves.items()))
    return Finding(
        case.component,
        leaf,
        "absent" if found is None else found,
        "absent" if expected is None else expected,
        len(case.leaves),
        case.moment,
        case.number,
        cause,
        evidence,
    )


def _started_again(
    history: History, past: list[Launch], launch: Launch, number: int
) -> Finding | None:
    """A launch that trains the first step again, though an earlier one has come further."""
    done, first = _last_step(past), first_step(launch)
    has_resumed = any(each.kind == RESUMED for each in launch)
    if has_resumed or done is None or first is None or first.step > history.steps[0]:
        return None
    cause, evidence = Cause.NEVER_RESUMED, f"The launch before had trained {done} steps."
    if any(each.facts.get("by") == "nothing" for each in launch):
        cause, evidence = Cause.WEIGHTS_RESTARTED, "They are the weights of no step of the run."
    values = f"step {first.step}", f"a step after {history.steps[0]}"
    return Finding("run", "", *values, 1, first, number, cause, evidence)


def _older_weights(history: History, launch: Launch, number: int) -> Finding | None:
    """A launch that the recorder aligned by its weights, while all else is of a later step."""
    first = first_step(launch)
    if first is None or "weights" not in first.facts:
        return None
    counter = history.steps_with_counter(first)
    rates = [history.steps_with(first, (LR, leaf)) for leaf in first.parts.get(LR, {})]
    votes = [counter, history.steps_with(first, (DATA, "samples"))]
    votes += [sorted(set(rates[0]).intersection(*rates))] if rates else []
    if first.step in counter:
        return None
    against = [vote for vote in votes if first.step not in vote]
    later = {step for vote in against for step in vote if step > first.step}
    agreed = sorted(step for step in later if sum(step in vote for vote in against) > 1)
    if not agreed:
        return None
    # A warmup may begin with a learning rate of 0: the weights of several steps are the first ones.
    is_first = first.facts["weights"] == history.first_weights
    cause = Cause.WEIGHTS_RESTARTED if is_first else Cause.WEIGHTS_OLDER
    evidence = f"The rest of the state is that of step {agreed[0]}."
    values = f"before step {first.step}", f"before step {agreed[0]}"
    return Finding("parameters", "", *values, 1, first, number, cause, evidence)


def _other_end(reference: Recording, judged: Recording) -> tuple[Finding, ...]:
    """A run that is equal as far as both go, and ended at another step."""
    found, expected = judged.last_step, reference.last_step
    steps = [each for each in judged.moments if each.kind == STEP]
    if judged.was_ended or found == expected or not steps:
        return ()
    number = max(judged.launches)
    evidence = f"All steps are equal; the run ended after step {found}, not {expected}."
    values = f"step {found}", f"step {expected}"
    return (Finding("run", "", *values, 1, steps[-1], number, Cause.PROGRESS_LOST, evidence),)


def _gap(past: list[Launch], launch: Launch, number: int) -> Finding | None:
    """A launch that begins after a step that nobody has trained."""
    done, first = _last_step(past), first_step(launch)
    if done is None or first is None or first.step <= done + 1:
        return None
    evidence = f"No launch trained the steps {done + 1} to {first.step - 1}."
    values = f"step {first.step}", f"step {done + 1} or before"
    return Finding("run", "", *values, 1, first, number, Cause.STEPS_SKIPPED, evidence)


def _last_step(launches: list[Launch]) -> int | None:
    steps = (each.step for launch in launches for each in launch if each.kind == STEP)
    return max(steps, default=None)
