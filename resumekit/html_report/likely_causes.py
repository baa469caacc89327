"""The likely cause of each difference between two recorded runs. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from resumekit.html_report.cause_rules import Cause, cause_of
from resumekit.html_report.recordings import (
    DATA,
    INPUTS,
    RESUMED,
    RNG,
    STEP,
    Launch,
    Moment,
    Recording,
)
from resumekit.html_report.run_history import Case, History, differing


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
        from_start = _started_again(history, past, launch, number)
        if from_start is not None:
            return (from_start,)
        cases = list(_cases(history, saved, launch, number, ignored))
        gap = _gap(past, launch, number)
        if gap is not None:
            return (gap, *_follow(cases, "the skipped steps"))
        if cases:
            return tuple(_explained(cases) if past else _not_reproducible(cases))
        saved.update({each.key: each for each in launch if each.kind == "checkpoint"})
        past.append(launch)
    return ()


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
        expected = history.moments.get(moment.key) or saved.get(moment.key)
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

    In a step the inputs come first, then its results, then the state that it leaves. A restarted
    optimizer is no consequence of other inputs.
    """
    first = [each for each in cases if each.moment == cases[0].moment]
    if first[0].moment.kind != STEP:
        return first
    inputs = [each for each in first if each.component in INPUTS]
    cold = [
        each
        for each in first
        if each.component not in INPUTS and cause_of(each, cases)[0] is Cause.OPTIMIZER_COLD
    ]
    results = [each for each in first if each.component in each.moment.values]
    return inputs + cold or results or first


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
    done = [each.step for one in past for each in one if each.kind == STEP]
    steps = [each for each in launch if each.kind == STEP]
    has_resumed = any(each.kind == RESUMED for each in launch)
    if has_resumed or not done or not steps or steps[0].step > history.steps[0]:
        return None
    return Finding(
        *("run", "", f"step {steps[0].step}", f"a step after {history.steps[0]}", 1),
        *(steps[0], number, Cause.NEVER_RESUMED),
        f"The launch before had trained {max(done)} steps.",
    )


def _gap(past: list[Launch], launch: Launch, number: int) -> Finding | None:
    done = [each.step for one in past for each in one if each.kind == STEP]
    first = next((each for each in launch if each.kind == STEP), None)
    if not done or first is None or first.step <= max(done) + 1:
        return None
    return Finding(
        *("run", "", f"step {first.step}", f"step {max(done) + 1} or before", 1),
        *(first, number, Cause.STEPS_SKIPPED),
        f"No launch trained the steps {max(done) + 1} to {first.step - 1}.",
    )
