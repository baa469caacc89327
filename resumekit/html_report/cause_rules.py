"""The rules that name a likely cause: one for each kind of component. Pure functions.

Each rule asks when the reference run had the value that the judged run has now: at its first step,
at the begin of the epoch, some steps before or after, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum

from resumekit.html_report.recordings import (
    DATA,
    IN_ANY_ORDER,
    INPUTS,
    LR,
    RESTORED,
    RESUMED,
    RNG,
    STEP,
    Moment,
)
from resumekit.html_report.run_history import Case, History, is_setting

# As found and expected.
Leaves = Mapping[str, tuple[str | None, str | None]]


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


def cause_of(case: Case, cases: Sequence[Case]) -> tuple[Cause, str]:
    """The likely cause of a difference, and what it rests on.

    Args:
        case: the difference.
        cases: all of the same launch.
    """
    if case.component in case.moment.values:
        return _of_result(case, cases)
    if case.component.rsplit("/", 1)[-1] == "gradients":
        return Cause.GRADIENTS_LOST, "The gradients of the open accumulation window differ."
    is_input = case.moment.kind == STEP and case.component in INPUTS
    rules = _RULES_OF_INPUTS if is_input else _RULES
    rule = rules.get(case.component if is_input else case.slot, _of_other)
    return rule(case)


def _of_result(case: Case, cases: Sequence[Case]) -> tuple[Cause, str]:
    """A loss that differs: either something explains it, or nothing that was recorded does."""
    same = [each for each in cases if each.moment.step <= case.moment.step and each != case]
    before = [each for each in same if each.component not in case.moment.values]
    states = [each for each in before if each.moment.kind != STEP]
    inputs = [each for each in before if each.component in INPUTS]
    if inputs or states:
        return Cause.UNKNOWN, "Inputs or state of the step differ already."
    weights = [each for each in before if each.slot in ("model", "parameters")]
    is_restored = any(
        each.kind == RESUMED or each.facts.get("by") in ("weights", "ambiguous")
        for each in case.launch
    )
    if is_restored or not weights:
        return Cause.UNSAVED_VARIABLE, "Inputs and restored state are equal; the result is not."
    return Cause.WEIGHTS_RESTARTED, "Inputs are equal; the first forward pass is not."


def _of_model(case: Case) -> tuple[Cause, str]:
    names = [_name(leaf) for leaf in case.leaves]
    if set(names) <= {"running_mean", "running_var", "num_batches_tracked"}:
        return Cause.BUFFERS_LOST, "Only running statistics differ."
    if case.moment.kind == STEP:
        is_equal = all(
            case.moment.parts.get(name) == case.expected.parts.get(name)
            for name in (*INPUTS, *case.moment.values)
        )
        if case.moment.values and is_equal:
            return Cause.UPDATE_DIFFERS, "The loss is equal; the weights after the update are not."
        return Cause.UNKNOWN, "The weights after the step differ."
    older = case.other_steps()
    if older:
        return Cause.WEIGHTS_OLDER, f"They are those of step {older[0]}."
    if len(case.leaves) < len(case.expected.parts.get(case.component, {})):
        return Cause.WEIGHTS_PARTLY, f"{len(case.leaves)} tensors differ; the others are equal."
    return Cause.WEIGHTS_RESTARTED, "No tensor is one that the reference run ever recorded."


def _of_buffers(case: Case) -> tuple[Cause, str]:
    return Cause.BUFFERS_LOST, f"{_differ(len(case.leaves))} The inputs of the step are equal."


def _of_optimizer(case: Case) -> tuple[Cause, str]:
    is_step = case.moment.kind == STEP
    state = {leaf: each for leaf, each in case.leaves.items() if _is_state(case, leaf)}
    settings = sorted({_name(leaf) for leaf in case.leaves.keys() - state.keys()})
    if not state or (is_step and settings):
        return Cause.OPTIMIZER_SETTINGS, f"Settings differ: {', '.join(settings[:4])}."
    if any(found is None for found, _ in state.values()):
        if _is_part(case, state):
            return Cause.OPTIMIZER_PARTLY, "It has no state for some of its parameters."
        return Cause.OPTIMIZER_COLD, "The optimizer has no state for its parameters."
    if case.moment.kind == RESTORED:
        return _of_restored_optimizer(case, state)
    counted = _of_counters(case, state)
    if counted or is_step:
        return counted or _cold_without_counter(case)
    older = case.other_steps()
    if older:
        return Cause.OPTIMIZER_OLDER, f"It is that of step {older[0]}."
    return Cause.UNKNOWN, f"{len(state)} leaves of its state differ."


def _of_counters(case: Case, state: Leaves) -> tuple[Cause, str] | None:
    for leaf in (leaf for leaf in state if _name(leaf) == "step"):
        steps = case.steps_with(leaf)
        if state[leaf][0] in ("0", "0.0"):
            return Cause.OPTIMIZER_COLD, "Its step count is 0."
        if case.step_of_fresh_start in steps:
            return Cause.OPTIMIZER_COLD, f"Its step count is that of step {steps[0]}."
        if steps:
            return Cause.OPTIMIZER_OLDER, f"Its step count is that of step {steps[0]}."
    return None


def _of_restored_optimizer(case: Case, state: Collection[str]) -> tuple[Cause, str]:
    """Before the first step of a launch: every value can be compared with those after each step."""
    if all(_name(leaf) == "step" for leaf in state):
        return Cause.OPTIMIZER_COUNTER, "Only its step count differs."
    older = case.other_steps()
    if older:
        return Cause.OPTIMIZER_OLDER, f"It is that of step {older[0]}."
    if _is_part(case, state):
        return Cause.OPTIMIZER_PARTLY, "The state of the other parameters is equal."
    return Cause.OPTIMIZER_COLD, "The reference run never had these moments."


def _is_state(case: Case, leaf: str) -> bool:
    is_recorded = case.moment.kind in (STEP, RESTORED)
    return leaf.startswith("state") or (is_recorded and not is_setting(leaf))


def _is_part(case: Case, state: Collection[str]) -> bool:
    """Whether the state of some parameters differs, and that of others does not."""
    every = case.expected.parts.get(case.component, {})
    owners = {leaf.rpartition(".")[0] for leaf in every if _is_state(case, leaf)}
    return len({leaf.rpartition(".")[0] for leaf in state}) < len(owners)


def _cold_without_counter(case: Case) -> tuple[Cause, str]:
    """After a step with equal inputs and results: which state was not restored."""
    names = (*INPUTS, *case.moment.values)
    parts, expected = case.moment.parts, case.expected.parts
    is_equal = all(parts.get(name) == expected.get(name) for name in names)
    if not case.moment.values or not is_equal:
        return Cause.UNKNOWN, "Its state after the step differs."
    if any(case.component in each.parts for each in case.launch if each.kind == RESTORED):
        return Cause.UPDATE_DIFFERS, "The loss is equal; the gradients are not."
    return Cause.OPTIMIZER_COLD, "The loss is equal; the moments after the update are not."


def _of_lr(case: Case) -> tuple[Cause, str]:
    steps = case.common_steps()
    if case.step_of_fresh_start in steps:
        return Cause.LR_RESTARTED, f"It is that of step {case.step_of_fresh_start}."
    if steps:
        return Cause.LR_SHIFTED, f"It is that of step {steps[0]}, not {case.moment.step}."
    return Cause.LR_CHANGED, "The reference run never had it."


def _of_lr_scheduler(case: Case) -> tuple[Cause, str]:
    for leaf in ("last_epoch", "_step_count"):
        for name, (found, _) in case.leaves.items():
            if _name(name) == leaf and found is not None and found.isdigit():
                cause = Cause.LR_RESTARTED if int(found) <= 1 else Cause.LR_SHIFTED
                return cause, f"Its {leaf} is {found}."
    steps = case.common_steps()
    if steps:
        return Cause.LR_SHIFTED, f"It is that of step {steps[0]}."
    return Cause.LR_CHANGED, "The reference run never had this state."


def _of_ema(case: Case) -> tuple[Cause, str]:
    model = set().union(
        *(leaves.values() for key, leaves in case.moment.parts.items() if key.startswith("model"))
    )
    found = [now for leaf, (now, _) in case.leaves.items() if "." in leaf and now is not None]
    if any(text in model for text in found):
        return Cause.EMA_RESTARTED, "It equals the weights."
    if any(leaf.endswith("n_averaged") for leaf in case.leaves):
        return Cause.EMA_RESTARTED, "Its count of averaged steps differs."
    return Cause.EMA_RESTARTED, "The averages are not those of the reference run."


def _of_other_model(case: Case) -> tuple[Cause, str]:
    """A model that no optimizer trains: its averages as they were before the step."""
    is_average = any(leaf.endswith("n_averaged") for leaf in case.expected.parts[case.component])
    restarted = Cause.EMA_RESTARTED if is_average else Cause.OTHER_MODEL_LOST
    first = case.history.steps[0]
    if first in case.common_steps():
        return restarted, f"It is that of step {first}."
    before = next((each for each in case.launch if each.kind == RESTORED), case.moment)
    weights = set(before.parts.get("parameters", {}).values())
    if any(found in weights for found, _ in case.leaves.values()):
        return restarted, "It equals the weights."
    return restarted, _differ(len(case.leaves))


def _of_data_state(case: Case) -> tuple[Cause, str]:
    for leaf, (found, expected) in case.leaves.items():
        name = _name(leaf)
        if name == "epoch" and found == "0":
            return Cause.DATA_RESTARTED, f"The loader is in epoch 0, not {expected}."
        if name == "batch" and found == "0":
            return Cause.EPOCH_RESTARTED, f"The loader is at batch 0, not {expected}."
        if name in ("batch", "samples") and found and expected and found.isdigit():
            cause = Cause.SAMPLES_REPEATED
            if expected.isdigit() and int(found) > int(expected):
                cause = Cause.SAMPLES_SKIPPED
            return cause, f"The loader is at {name} {found}, not {expected}."
    if all(found is None for found, _ in case.leaves.values()):
        return Cause.DATA_RESTARTED, "The loader has no position."
    return Cause.ORDER_RESHUFFLED, "The position is equal; the order of the epoch is not."


def _of_data(case: Case) -> tuple[Cause, str]:
    """The batch of a step: when did the reference run use it?"""
    found, expected = case.leaves.get("samples", (None, None))
    if found and expected and _has_same_samples(case, found, expected):
        return Cause.BATCH_ORDER, "The samples are the same ones."
    steps = case.steps_with("samples") if found is not None else []
    if not steps:
        return _of_unknown_batch(case, found, expected)
    step, now = _nearest(steps, case.moment.step), case.moment.step
    first_of_epoch = _first_step_of_epoch(case.history, case.expected)
    done = now - case.resumed - 1
    evidence = f"The batch is that of step {step}, not {now}."
    if case.step_of_fresh_start in steps:
        return Cause.DATA_RESTARTED, evidence
    if first_of_epoch is not None and first_of_epoch + done in steps:
        return Cause.EPOCH_RESTARTED, evidence
    if _is_same_batch_of_another_epoch(case, step):
        return Cause.EPOCH_ORDER, evidence
    return (Cause.SAMPLES_REPEATED if step < now else Cause.SAMPLES_SKIPPED), evidence


def _of_unknown_batch(case: Case, found: str | None, expected: str | None) -> tuple[Cause, str]:
    if found is None or expected is None:
        names = ", ".join(case.leaves)
        return Cause.EPOCH_RESTARTED, f"The position differs: {names}."
    now, then = case.leaves.get("count", (_count(found), _count(expected)))
    if now != then:
        return Cause.BATCH_SIZE, f"{now} samples instead of {then}."
    return Cause.ORDER_RESHUFFLED, "The reference run never had this batch."


def _has_same_samples(case: Case, found: str, expected: str) -> bool:
    """Whether a batch has the same ids in another order; a journal has digests of them only."""
    if IN_ANY_ORDER in case.moment.parts[DATA]:
        return IN_ANY_ORDER not in case.leaves
    return sorted(found.split(",")) == sorted(expected.split(","))


def _count(samples: str) -> str:
    return str(len(samples.split(",")))


def _is_same_batch_of_another_epoch(case: Case, step: int) -> bool:
    here, there = map(case.history.first_step_of_pass, (case.moment.step, step))
    if here is not None and there is not None:
        return here != there and case.moment.step - here == step - there
    used = case.history.moments.get((True, step, 0))
    then = {} if used is None else used.parts.get(DATA, {})
    now = case.expected.parts.get(DATA, {})
    has_position = "batch" in now and "epoch" in now
    return has_position and then.get("batch") == now["batch"] and then.get("epoch") != now["epoch"]


def _first_step_of_epoch(history: History, expected: Moment) -> int | None:
    """The first step of the epoch that a moment of the reference is in."""
    data = expected.parts.get(DATA, {})
    batch = data.get("batch", "")
    if batch.isdigit():
        return expected.step - int(batch)
    steps = [
        moment.step
        for moment in history.moments.values()
        if moment.kind == STEP and moment.parts.get(DATA, {}).get("epoch") == data.get("epoch")
    ]
    if steps and "epoch" in data:
        return min(steps)
    return history.first_step_of_pass(expected.step)


def _of_rng(case: Case) -> tuple[Cause, str]:
    names = ", ".join(leaf.partition(".")[0] for leaf in case.leaves)
    steps = case.common_steps()
    if case.moment.kind == STEP and case.step_of_fresh_start in steps:
        return Cause.RNG_RESTARTED, f"{names}: the state of step {case.step_of_fresh_start}."
    if steps:
        distance = _nearest(steps, case.moment.step) - case.moment.step
        if distance > 0:
            return Cause.RNG_AHEAD, f"{names}: ahead by the draws of {distance} steps."
        if distance < 0:
            return Cause.RNG_BEHIND, f"{names}: behind by the draws of {-distance} steps."
    return _of_draws(case) or (
        Cause.RNG_LOST,
        f"{names}: a state that the reference run never recorded.",
    )


def _of_draws(case: Case) -> tuple[Cause, str] | None:
    """By how many draws a generator is elsewhere, where the recorder saw the same words."""
    for now in (each for each in case.launch if each.kind == STEP):
        fresh = case.step_of_fresh_start + now.step - case.moment.step
        for name in case.leaves:
            there = case.history.distance(now, name, now.step)
            restarted = case.history.distance(now, name, fresh)
            if restarted is not None and (there is None or abs(restarted) < abs(there)):
                return Cause.RNG_RESTARTED, f"{name}: {restarted:+d} draws from step {fresh}."
            if there:
                cause = Cause.RNG_AHEAD if there > 0 else Cause.RNG_BEHIND
                word = "ahead" if there > 0 else "behind"
                return cause, f"{name}: {word} by {abs(there)} draws."
    return None


def _nearest(steps: list[int], step: int) -> int:
    return min(steps, key=lambda each: abs(each - step))


def _of_values(cause: Cause) -> Callable[[Case], tuple[Cause, str]]:
    """The rule of a state that is lost in one way only."""

    def rule(case: Case) -> tuple[Cause, str]:
        older = [step for step in case.common_steps() if step < case.moment.step]
        if older:
            return cause, f"It is that of step {older[-1]}."
        leaf, (found, _) = next(iter(case.leaves.items()))
        if found in ("None", "0", "0.0", "{}", "[]", "False", None):
            return cause, f"{leaf or case.component} is {found or 'absent'}."
        return cause, _differ(len(case.leaves))

    return rule


def _name(leaf: str) -> str:
    """The last part of a leaf's path."""
    return leaf.rsplit(".", 1)[-1]


def _differ(number: int) -> str:
    return "1 value differs." if number == 1 else f"{number} values differ."


_of_other = _of_values(Cause.UNKNOWN)

# Of a step record: the values of its inputs.
_RULES_OF_INPUTS = {DATA: _of_data, LR: _of_lr, RNG: _of_rng}

# Of a state, by slot.
_RULES = {
    "model": _of_model,
    "parameters": _of_model,
    "buffers": _of_buffers,
    "modules": _of_other_model,
    "optimizer": _of_optimizer,
    "lr_scheduler": _of_lr_scheduler,
    "grad_scaler": _of_values(Cause.SCALER_RESET),
    "ema": _of_ema,
    "data": _of_data_state,
    "rng": _of_rng,
    "progress": _of_values(Cause.PROGRESS_LOST),
    "best_metric": _of_values(Cause.BEST_METRIC_LOST),
    "callbacks": _of_values(Cause.CALLBACKS_LOST),
    "extras": _of_values(Cause.EXTRAS_LOST),
}
