"""The likely cause of each difference between two recorded runs. Pure functions.

A difference is judged by when the reference run had the value that the judged run has now: at its
first step, at the begin of the epoch, some steps before or after, or never. ``_ROWS`` is the table:
by component, a cause, the predicate that shows it, and the text of the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from resumekit.prove.cases import Case, History, first_differences
from resumekit.prove.result import RUN, describe
from resumekit.record.moments import (
    CHECKPOINT,
    DATA,
    FOUND_BY_CHANCE,
    IN_ANY_ORDER,
    INPUTS,
    LR,
    RESTORED,
    RESUMED,
    RNG,
    STEP,
    Launch,
    Leaves,
    Moment,
    Recording,
    differences,
    first_step,
)


class Cause(str, Enum):
    """Why two runs differ, in the words of the report."""

    NOT_REPRODUCIBLE = "not reproducible: the runs differ before the first stop"
    NEVER_RESUMED = "started again from the first step"
    STEPS_SKIPPED = "steps never trained"
    WEIGHTS_RESTARTED = "weights restarted"
    WEIGHTS_OLDER = "weights of an older step"
    BUFFERS_LOST = "buffers not restored"
    WEIGHTS_PARTLY = "part of the weights not restored"
    OPTIMIZER_COLD = "optimizer cold"
    OPTIMIZER_PARTLY = "part of the optimizer state not restored"
    OPTIMIZER_OLDER = "optimizer state of an older step"
    OPTIMIZER_COUNTER = "step counter of the optimizer changed"
    OPTIMIZER_SETTINGS = "param group settings changed"
    UPDATE_DIFFERS = "same gradients or moments not used for the update"
    GRADIENTS_LOST = "gradient accumulation lost"
    LR_RESTARTED = "LR restarted"
    LR_SHIFTED = "LR of another step"
    LR_CHANGED = "LR is one that the run never had"
    EMA_RESTARTED = "EMA restarted"
    OTHER_MODEL_LOST = "a model that is not trained was not restored"
    SCALER_RESET = "scaler reset"
    DATA_RESTARTED = "data restarted from the first epoch"
    EPOCH_RESTARTED = "epoch restarted"
    SAMPLES_REPEATED = "samples repeated"
    SAMPLES_SKIPPED = "samples skipped"
    EPOCH_ORDER = "order of another epoch"
    BATCH_ORDER = "order inside the batch changed"
    BATCH_SIZE = "batch size changed"
    ORDER_RESHUFFLED = "order reshuffled"
    RNG_RESTARTED = "RNG restarted from the seed"
    RNG_AHEAD = "RNG ahead"
    RNG_BEHIND = "RNG behind"
    RNG_LOST = "RNG state not restored"
    PROGRESS_LOST = "step and epoch counters lost"
    BEST_METRIC_LOST = "best metric lost"
    CALLBACKS_LOST = "callback state lost"
    EXTRAS_LOST = "user state lost"
    CHANGED = "a change since the run"
    UNSAVED_VARIABLE = "a variable that is not in the checkpoint"
    CONSEQUENCE = "follows"
    UNKNOWN = "unknown"


# How the recorder aligned a launch that has weights of the run.
_ALIGNED = ("weights", "ambiguous")


@dataclass(frozen=True)
class Finding:
    """The first difference of one component, with its likely cause.

    Args:
        component: the component, or ``data``, ``lr``, ``rng``, or a result such as ``loss``; or
            ``run`` for what a launch did.
        leaves: each leaf that differs, as found and expected; None for an absent one.
        moment: where it was seen.
        launch: the launch of the judged run.
        cause: the likely cause.
        evidence: what the cause rests on.
    """

    component: str
    leaves: Leaves
    moment: Moment
    launch: int
    cause: Cause
    evidence: str


def find_first_causes(
    references: Mapping[int, Recording], judged: Mapping[int, Recording]
) -> tuple[int, tuple[Finding, ...]]:
    """The first rank that differs, and the causes there; rank 0 and none without a difference."""
    ranks = sorted(references.keys() & judged.keys())
    found = ((rank, find_causes(references[rank], judged[rank])) for rank in ranks)
    return next((each for each in found if each[1]), (0, ()))


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
    trained: list[int] = []
    for index, (number, launch) in enumerate(judged.launches.items()):
        first, done = first_step(launch), max(trained, default=None)
        cases = first_differences(history, saved, launch, number, ignored)
        if first is not None and index:
            restarted = _older_weights(history, first, number)
            restarted = restarted or _started_again(history, done, first, launch, number)
            if restarted is not None:
                return (restarted,)
        if first is not None and done is not None and first.step > done + 1:
            values = f"step {first.step}", f"step {done + 1} or before"
            evidence = f"No launch trained the steps {done + 1} to {first.step - 1}."
            gap = Finding(RUN, {"": values}, first, number, Cause.STEPS_SKIPPED, evidence)
            return (gap, *_follow(cases, "the skipped steps"))
        if cases:
            alone = Cause.NOT_REPRODUCIBLE, "No launch had been stopped before."
            return tuple(_explained(cases) if index else (_finding(each, *alone) for each in cases))
        saved.update({each.key: each for each in launch if each.kind == CHECKPOINT})
        trained += [each.step for each in launch if each.kind == STEP]
    return _other_end(reference, judged)


def _own_constants(history: History, judged: Recording) -> frozenset[tuple[bool, str, str]]:
    """Constants of each run, such as the state of a generator that nobody seeds or draws from."""
    found = set()
    for moment in next(iter(judged.launches.values()), ()):
        expected = history.moments.get(moment.key)
        for component, leaves in differences(moment, expected).items() if expected else ():
            if component.split("/")[0] in (RNG, DATA, "callbacks", "extras"):
                found |= {(moment.kind == STEP, component, leaf) for leaf in leaves}
    return history.constants & found


def _started_again(
    history: History, done: int | None, first: Moment, launch: Launch, number: int
) -> Finding | None:
    """A launch that trains the first step again, though an earlier one has come further."""
    has_resumed = any(each.kind == RESUMED for each in launch)
    if has_resumed or done is None or first.step > history.first_step:
        return None
    cause, evidence = Cause.NEVER_RESUMED, f"The launch before had trained {done} steps."
    if any(each.fields.get("by") == "nothing" for each in launch):
        cause, evidence = Cause.WEIGHTS_RESTARTED, "They are the weights of no step of the run."
    values = f"step {first.step}", f"a step after {history.first_step}"
    return Finding(RUN, {"": values}, first, number, cause, evidence)


def _older_weights(history: History, first: Moment, number: int) -> Finding | None:
    """A launch that the recorder aligned by its weights, while all else is of a later step."""
    if "weights" not in first.fields:
        return None
    counter = first.fields.get("counter")
    counted = [each.step for each in history.steps if counter and each.fields["counter"] == counter]
    rates = [set(history.steps_with(first, LR, leaf)) for leaf in first.parts.get(LR, {})]
    votes = [set(counted), set(history.steps_with(first, DATA, "samples"))]
    votes += [set.intersection(*rates)] if rates else []
    against = [vote for vote in votes if first.step not in vote]
    later = {step for vote in against for step in vote if step > first.step}
    agreed = sorted(step for step in later if sum(step in vote for vote in against) > 1)
    if first.step in counted or not agreed:
        return None
    # A warmup may begin with a learning rate of 0: the weights of several steps are the first ones.
    is_first = first.fields["weights"] == history.steps[0].fields["weights"]
    cause = Cause.WEIGHTS_RESTARTED if is_first else Cause.WEIGHTS_OLDER
    evidence = f"The rest of the state is that of step {agreed[0]}."
    values = f"before step {first.step}", f"before step {agreed[0]}"
    return Finding("parameters", {"": values}, first, number, cause, evidence)


def _other_end(reference: Recording, judged: Recording) -> tuple[Finding, ...]:
    """A run that is equal as far as both go, and ended at another step."""
    found, expected = judged.last_step, reference.last_step
    steps = [each for each in judged.moments if each.kind == STEP]
    if judged.was_ended or found == expected or not steps:
        return ()
    evidence = f"All steps are equal; the run ended after step {found}, not {expected}."
    values, number = (f"step {found}", f"step {expected}"), max(judged.launches)
    return (Finding(RUN, {"": values}, steps[-1], number, Cause.PROGRESS_LOST, evidence),)


def _explained(cases: Sequence[Case]) -> list[Finding]:
    """Each case with its cause; what another case explains comes last."""
    roots = _roots(cases)
    names = ", ".join(dict.fromkeys(each.component for each in roots))
    rest = _follow([each for each in cases if each not in roots], names)
    return [_finding(case, *cause_of(case)) for case in roots] + rest


def _follow(cases: Iterable[Case], names: str) -> list[Finding]:
    return [_finding(each, Cause.CONSEQUENCE, f"Follows from {names}.") for each in cases]


def _finding(case: Case, cause: Cause, evidence: str) -> Finding:
    return Finding(case.component, case.leaves, case.moment, case.number, cause, evidence)


def _roots(cases: Sequence[Case]) -> list[Case]:
    """The cases of the first moment that differs: what differs later follows from them.

    In a step the inputs come first, then its results, then the state that it leaves. What the step
    does not use is no consequence of other inputs, and neither is a restarted optimizer.
    """
    first = [each for each in cases if each.moment == cases[0].moment]
    if first[0].moment.kind == RESTORED:  # the weights and the optimizer alone
        step = first_step(first[0].launch)
        return first + _independent([each for each in cases if each.moment == step])
    if not _is_step(first[0]):
        return first
    independent = _independent(first)
    is_scheduled = any(each.component == LR for each in first)  # and other settings with it
    # What an optimizer has lost by itself, whatever the inputs of the step were.
    lost = {Cause.OPTIMIZER_COLD, Cause.OPTIMIZER_PARTLY, Cause.OPTIMIZER_OLDER}
    lost |= set() if is_scheduled else {Cause.OPTIMIZER_SETTINGS}
    cold = [each for each in first if each not in independent and cause_of(each)[0] in lost]
    results = [each for each in first if each.topic == "result"]
    return independent + cold or results or first


def _independent(step: Sequence[Case]) -> list[Case]:
    """The inputs of a step that differ, and the states that the step neither uses nor changes."""
    found = [each for each in step if each.component in INPUTS or each.slot in FOUND_BY_CHANCE]
    if any(each.component == DATA and cause_of(each)[0] is Cause.BATCH_SIZE for each in found):
        # A dropout draws as many numbers as the batch needs.
        found = [each for each in found if each.component != RNG]
    return found


# ---------------------------------------------------------------- what is looked for

# What fills the text of a row, after the cause where that depends on it; nothing or False where the
# row does not apply.
Found = Sequence[Any] | bool


def _always(case: Case) -> Found:
    return True


def _is_step(case: Case) -> bool:
    return case.moment.kind == STEP


def _is_restored(case: Case) -> bool:
    """Before the first step of a launch: every value can be compared with those after each step."""
    return case.moment.kind == RESTORED


def _number(case: Case) -> Found:
    return ["1 value differs." if len(case.leaves) == 1 else f"{len(case.leaves)} values differ."]


def _step(case: Case) -> Found:
    """The step of the reference with these values, and the one of the case."""
    return [case.common_steps[0], case.moment.step] if case.common_steps else ()


def _other_step(case: Case) -> Found:
    return [step for step in case.common_steps if step != case.moment.step]


def _earlier_step(case: Case) -> Found:
    return [step for step in case.common_steps if step < case.moment.step][-1:]


def _fresh_step(case: Case) -> Found:
    return [case.fresh] if case.fresh in case.common_steps else ()


def _first_step(case: Case) -> Found:
    first = case.history.first_step
    return [first] if first in case.common_steps else ()


def _initial(case: Case) -> Found:
    leaf, (found, _) = next(iter(case.leaves.items()))
    is_initial = found in ("None", "0", "0.0", "{}", "[]", "False", None)
    return [leaf or case.component, found or "absent"] if is_initial else ()


def _has_cause_before(case: Case) -> Found:
    return any(each.component in INPUTS or not _is_step(each) for each in case.cases_before())


def _has_restored_weights(case: Case) -> Found:
    is_equal = all(each.slot not in ("model", "parameters") for each in case.cases_before())
    aligned = (each.kind == RESUMED or each.fields.get("by") in _ALIGNED for each in case.launch)
    return is_equal or any(aligned)


def _equal_result(case: Case) -> bool:
    """After a step with equal inputs and results."""
    now, then = case.moment.parts, case.expected.parts
    names = (*INPUTS, *case.moment.values)
    is_equal = all(now.get(name) == then.get(name) for name in names)
    return _is_step(case) and bool(case.moment.values) and is_equal


def _statistics(case: Case) -> Found:
    return set(map(_name, case.leaves)) <= {"running_mean", "running_var", "num_batches_tracked"}


def _num_tensors(case: Case) -> Found:
    return [len(case.leaves)] if len(case.leaves) < len(case.before) else ()


def _has_weights(case: Case) -> Found:
    """Whether one of the averages, or of the tensors of another model, is one of the weights."""
    moment = next((each for each in case.launch if each.kind == RESTORED), case.moment)
    models = [moment.parts[key] for key in moment.parts if key.startswith(("model", "parameters"))]
    now = case.moment.parts.get(case.component, {})
    found = {now.get(leaf) for leaf in case.leaves if "." in leaf or case.slot != "ema"}
    return not found.isdisjoint(text for leaves in models for text in leaves.values())


def _num_averaged(case: Case) -> Found:
    return any(leaf.endswith("n_averaged") for leaf in case.leaves)


def _is_restored_part(case: Case) -> Found:
    return _is_restored(case) and case.is_part()


def _only_counters(case: Case) -> Found:
    return _is_restored(case) and all(_name(leaf) == "step" for leaf in case.state)


def _settings(case: Case) -> Found:
    settings = sorted({_name(leaf) for leaf in case.leaves.keys() - case.state.keys()})
    is_found = not case.state or (_is_step(case) and settings)
    return [", ".join(settings[:4])] if is_found else ()


def _lacks_state(case: Case) -> bool:
    return any(found is None for found, _ in case.state.values())


def _lacks_part(case: Case) -> Found:
    return _lacks_state(case) and case.is_part()


def _counter(case: Case) -> Found:
    """The first step count that differs and can be explained."""
    for leaf in case.state if not _is_restored(case) else ():
        steps, is_zero = case.steps_with(leaf), case.leaves[leaf][0] in ("0", "0.0")
        if _name(leaf) == "step" and (steps or is_zero):
            is_fresh = is_zero or case.fresh in steps
            cause = Cause.OPTIMIZER_COLD if is_fresh else Cause.OPTIMIZER_OLDER
            return cause, "0" if is_zero else f"that of step {steps[0]}"
    return ()


def _has_restored_state(case: Case) -> Found:
    restored = (each for each in case.launch if each.kind == RESTORED)
    return _equal_result(case) and any(case.component in each.parts for each in restored)


def _scheduler_counter(case: Case) -> Found:
    for leaf in ("last_epoch", "_step_count"):
        for name, (found, _) in case.leaves.items():
            if _name(name) == leaf and found is not None and found.isdigit():
                return (Cause.LR_RESTARTED if int(found) <= 1 else Cause.LR_SHIFTED), leaf, found
    return ()


def _position(case: Case) -> Found:
    """What is wrong with the position of a loader."""
    for leaf, (found, expected) in case.leaves.items():
        name = _name(leaf)
        if name == "epoch" and found == "0":
            return Cause.DATA_RESTARTED, "in epoch", found, expected
        if name == "batch" and found == "0":
            return Cause.EPOCH_RESTARTED, "at batch", found, expected
        if name in ("batch", "samples") and found and expected and found.isdigit():
            is_ahead = expected.isdigit() and int(found) > int(expected)
            cause = Cause.SAMPLES_SKIPPED if is_ahead else Cause.SAMPLES_REPEATED
            return cause, f"at {name}", found, expected
    return ()


def _is_absent(case: Case) -> Found:
    return all(found is None for found, _ in case.leaves.values())


def _samples(case: Case) -> tuple[str | None, str | None]:
    return case.leaves.get("samples", (None, None))


def _has_same_samples(case: Case) -> Found:
    """Whether a batch has the same ids in another order; a journal has digests of them only."""
    found, expected = _samples(case)
    if not found or not expected:
        return False
    if IN_ANY_ORDER in case.moment.parts[DATA]:
        return IN_ANY_ORDER not in case.leaves
    return sorted(found.split(",")) == sorted(expected.split(","))


def _batch(case: Case) -> Found:
    """When the reference run used the batch, and when this one does."""
    now, data = case.moment.step, case.expected.parts.get(DATA, {})
    steps = [] if _samples(case)[0] is None else case.steps_with("samples")
    if not steps:
        return ()
    step = case.nearest(steps)
    first, other = map(case.history.first_step_of_epoch, (now, step))
    has_position = "batch" in data or "epoch" not in data  # a journal has the epoch alone
    cause = Cause.SAMPLES_REPEATED if step < now else Cause.SAMPLES_SKIPPED
    if case.fresh in steps:
        cause = Cause.DATA_RESTARTED
    elif first is not None and first + now - case.resumed - 1 in steps:
        cause = Cause.EPOCH_RESTARTED
    elif has_position and first is not None and other is not None:
        cause = Cause.EPOCH_ORDER if first != other and now - first == step - other else cause
    return cause, step, now


def _position_of_batch(case: Case) -> Found:
    return [", ".join(case.leaves)] if None in _samples(case) else ()


def _batch_sizes(case: Case) -> Found:
    sizes = case.leaves.get("count") or [str(len((ids or "").split(","))) for ids in _samples(case)]
    return [*map(describe, sizes)] if sizes[0] != sizes[1] else ()


def _generators(case: Case) -> Sequence[str]:
    return [", ".join(leaf.partition(".")[0] for leaf in case.leaves)]


def _fresh_generators(case: Case) -> Found:
    is_fresh = _is_step(case) and case.fresh in case.common_steps
    return [*_generators(case), case.fresh] if is_fresh else ()


def _moved_generators(case: Case) -> Found:
    distance = case.nearest(case.common_steps) - case.moment.step
    return _moved(_generators(case)[0], distance, "the draws of {} steps")


def _moved(name: str, distance: int, unit: str) -> Found:
    cause, word = (Cause.RNG_AHEAD, "ahead") if distance > 0 else (Cause.RNG_BEHIND, "behind")
    return (cause, f"{name}: {word} by {unit.format(abs(distance))}.") if distance else ()


def _draws(case: Case) -> Found:
    """By how many draws a generator is elsewhere, where the recorder saw the same words."""
    for now in (each for each in case.launch if each.kind == STEP):
        fresh = case.fresh + now.step - case.moment.step
        for name in case.leaves:
            there = case.history.distance(now, name, now.step)
            restarted = case.history.distance(now, name, fresh)
            if restarted is not None and (there is None or abs(restarted) < abs(there)):
                return Cause.RNG_RESTARTED, f"{name}: {restarted:+d} draws from step {fresh}."
            if there:
                return _moved(name, there, "{} draws")
    return ()


def _name(leaf: str) -> str:
    """The last part of a leaf's path."""
    return leaf.rsplit(".", 1)[-1]


# ---------------------------------------------------------------- the table

# The cause, or None where the fact decides it; what is looked for; what the cause rests on.
Row = tuple[Cause | None, Callable[[Case], Found], str]

_STEP = "It is that of step {}."
_EQUAL = "The loss is equal;"
_NOTHING_ELSE = "Inputs and restored state are equal; the result is not."

_MODEL: tuple[Row, ...] = (
    (Cause.BUFFERS_LOST, _statistics, "Only running statistics differ."),
    (Cause.UPDATE_DIFFERS, _equal_result, f"{_EQUAL} the weights after the update are not."),
    (Cause.UNKNOWN, _is_step, "The weights after the step differ."),
    (Cause.WEIGHTS_OLDER, _other_step, "They are those of step {}."),
    (Cause.WEIGHTS_PARTLY, _num_tensors, "{} tensors differ; the others are equal."),
    (Cause.WEIGHTS_RESTARTED, _always, "No tensor is one that the reference run ever recorded."),
)


def _lost(cause: Cause) -> tuple[Row, ...]:
    """The rows of a state that is lost in one way only."""
    return (cause, _earlier_step, _STEP), (cause, _initial, "{} is {}."), (cause, _number, "{}")


def _untrained(cause: Cause) -> tuple[Row, ...]:
    """The rows of a model that no optimizer trains."""
    return (
        (cause, _first_step, _STEP),
        (cause, _has_weights, "It equals the weights."),
        (cause, _number, "{}"),
    )


# By component, or by what it is: the first row that applies is the cause.
_ROWS: dict[str, tuple[Row, ...]] = {
    "result": (
        (Cause.UNKNOWN, _has_cause_before, "Inputs or state of the step differ already."),
        (Cause.UNSAVED_VARIABLE, _has_restored_weights, _NOTHING_ELSE),
        (Cause.WEIGHTS_RESTARTED, _always, "Inputs are equal; the first forward pass is not."),
    ),
    "gradients": (
        (Cause.GRADIENTS_LOST, _always, "The gradients of the open accumulation window differ."),
    ),
    "model": _MODEL,
    "parameters": _MODEL,
    "buffers": ((Cause.BUFFERS_LOST, _number, "{} The inputs of the step are equal."),),
    "modules": _untrained(Cause.OTHER_MODEL_LOST),
    "averaged modules": _untrained(Cause.EMA_RESTARTED),
    "ema": (
        (Cause.EMA_RESTARTED, _has_weights, "It equals the weights."),
        (Cause.EMA_RESTARTED, _num_averaged, "Its count of averaged steps differs."),
        (Cause.EMA_RESTARTED, _always, "The averages are not those of the reference run."),
    ),
    "optimizer": (
        (Cause.OPTIMIZER_SETTINGS, _settings, "Settings differ: {}."),
        (Cause.OPTIMIZER_PARTLY, _lacks_part, "It has no state for some of its parameters."),
        (Cause.OPTIMIZER_COLD, _lacks_state, "The optimizer has no state for its parameters."),
        (Cause.OPTIMIZER_COUNTER, _only_counters, "Only its step count differs."),
        (None, _counter, "Its step count is {}."),
        (Cause.UPDATE_DIFFERS, _has_restored_state, f"{_EQUAL} the gradients are not."),
        (Cause.OPTIMIZER_COLD, _equal_result, f"{_EQUAL} the moments after the update are not."),
        (Cause.UNKNOWN, _is_step, "Its state after the step differs."),
        (Cause.OPTIMIZER_OLDER, _other_step, _STEP),
        (Cause.OPTIMIZER_PARTLY, _is_restored_part, "The state of the other parameters is equal."),
        (Cause.OPTIMIZER_COLD, _is_restored, "The reference run never had these moments."),
        (Cause.UNKNOWN, lambda case: [len(case.state)], "{} leaves of its state differ."),
    ),
    "lr": (
        (Cause.LR_RESTARTED, _fresh_step, _STEP),
        (Cause.LR_SHIFTED, _step, "It is that of step {}, not {}."),
        (Cause.LR_CHANGED, _always, "The reference run never had it."),
    ),
    "lr_scheduler": (
        (None, _scheduler_counter, "Its {} is {}."),
        (Cause.LR_SHIFTED, _step, _STEP),
        (Cause.LR_CHANGED, _always, "The reference run never had this state."),
    ),
    "data": (
        (None, _position, "The loader is {} {}, not {}."),
        (Cause.DATA_RESTARTED, _is_absent, "The loader has no position."),
        (Cause.ORDER_RESHUFFLED, _always, "The position is equal; the order of the epoch is not."),
    ),
    "batch": (
        (Cause.BATCH_ORDER, _has_same_samples, "The samples are the same ones."),
        (None, _batch, "The batch is that of step {}, not {}."),
        (Cause.EPOCH_RESTARTED, _position_of_batch, "The position differs: {}."),
        (Cause.BATCH_SIZE, _batch_sizes, "{} samples instead of {}."),
        (Cause.ORDER_RESHUFFLED, _always, "The reference run never had this batch."),
    ),
    "rng": (
        (Cause.RNG_RESTARTED, _fresh_generators, "{}: the state of step {}."),
        (None, _moved_generators, "{}"),
        (None, _draws, "{}"),
        (Cause.RNG_LOST, _generators, "{}: a state that the reference run never recorded."),
    ),
    "grad_scaler": _lost(Cause.SCALER_RESET),
    "progress": _lost(Cause.PROGRESS_LOST),
    "best_metric": _lost(Cause.BEST_METRIC_LOST),
    "callbacks": _lost(Cause.CALLBACKS_LOST),
    "extras": _lost(Cause.EXTRAS_LOST),
}


def cause_of(case: Case) -> tuple[Cause, str]:
    """The likely cause of a difference, and what it rests on: the first row that applies."""
    rows = _ROWS.get(case.topic) or _lost(Cause.UNKNOWN)
    cause, found, text = next((c, f, t) for c, fact, t in rows if (f := fact(case)))
    values = [] if isinstance(found, bool) else [*found]
    return cause or values.pop(0), text.format(*values)
