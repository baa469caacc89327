"""The rules that name a likely cause: one for each kind of component. Pure functions.

Each rule asks when the reference run had the value that the judged run has now: at its first step,
at the begin of the epoch, some steps before or after, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from resumekit.html_report.recordings import DATA, INPUTS, LR, RESUMED, RNG, STEP, Moment
from resumekit.html_report.run_history import Case, History


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
    OPTIMIZER_OLDER = "optimizer state of an older step"
    OPTIMIZER_SETTINGS = "param group settings changed"
    UPDATE_DIFFERS = "same gradients or moments not used for the update"
    GRADIENTS_LOST = "gradient accumulation lost"
    LR_RESTARTED = "LR restarted"
    LR_SHIFTED = "LR of another step"
    LR_CHANGED = "LR is one that the run never had"
    EMA_RESTARTED = "EMA restarted"
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
    weights = [each for each in before if each.slot == "model"]
    if any(each.kind == RESUMED for each in case.launch) or not weights:
        return Cause.UNSAVED_VARIABLE, "Inputs and restored state are equal; the result is not."
    return Cause.WEIGHTS_RESTARTED, "Inputs are equal; the first forward pass is not."


def _of_model(case: Case) -> tuple[Cause, str]:
    names = [leaf.rsplit(".", 1)[-1] for leaf in case.leaves]
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
    older = [step for step in case.common_steps() if step != case.moment.step]
    if older:
        return Cause.WEIGHTS_OLDER, f"They are those of step {older[0]}."
    if len(case.leaves) < len(case.expected.parts.get(case.component, {})):
        return Cause.WEIGHTS_PARTLY, f"{len(case.leaves)} tensors differ; the others are equal."
    return Cause.WEIGHTS_RESTARTED, "No tensor is one that the reference run ever recorded."


def _of_optimizer(case: Case) -> tuple[Cause, str]:
    state = {leaf: each for leaf, each in case.leaves.items() if leaf.startswith("state")}
    if not state:
        names = sorted({leaf.rsplit(".", 1)[-1] for leaf in case.leaves})
        return Cause.OPTIMIZER_SETTINGS, f"Only settings differ: {', '.join(names[:4])}."
    if any(found is None for found, _ in state.values()):
        return Cause.OPTIMIZER_COLD, "The optimizer has no state for its parameters."
    counters = [leaf for leaf in state if leaf.rsplit(".", 1)[-1] == "step"]
    for leaf in counters:
        steps = case.steps_with(leaf)
        if state[leaf][0] in ("0", "0.0"):
            return Cause.OPTIMIZER_COLD, "Its step count is 0."
        if case.step_of_fresh_start in steps:
            return Cause.OPTIMIZER_COLD, f"Its step count is that of step {steps[0]}."
        if steps:
            return Cause.OPTIMIZER_OLDER, f"Its step count is that of step {steps[0]}."
    if case.moment.kind == STEP:
        return _cold_without_counter(case)
    older = [step for step in case.common_steps() if step != case.moment.step]
    if older:
        return Cause.OPTIMIZER_OLDER, f"It is that of step {older[0]}."
    return Cause.UNKNOWN, f"{len(state)} leaves of its state differ."


def _cold_without_counter(case: Case) -> tuple[Cause, str]:
    """After a step with equal inputs and results, moments differ: they were not restored."""
    names = (*INPUTS, *case.moment.values)
    parts, expected = case.moment.parts, case.expected.parts
    if case.moment.values and all(parts.get(name) == expected.get(name) for name in names):
        return Cause.OPTIMIZER_COLD, "The loss is equal; the moments after the update are not."
    return Cause.UNKNOWN, "Its state after the step differs."


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
            if name.rsplit(".", 1)[-1] == leaf and found is not None and found.isdigit():
                if int(found) <= 1:
                    return Cause.LR_RESTARTED, f"Its {leaf} is {found}."
                return Cause.LR_SHIFTED, f"Its {leaf} is {found}."
    steps = case.common_steps()
    if steps:
        return Cause.LR_SHIFTED, f"It is that of step {steps[0]}."
    return Cause.LR_CHANGED, "The reference run never had this state."


def _of_ema(case: Case) -> tuple[Cause, str]:
    model = set().union(
        *(set(leaves.values()) for key, leaves in case.moment.parts.items() if key[:5] == "model")
    )
    found = [now for leaf, (now, _) in case.leaves.items() if "." in leaf and now is not None]
    if any(text in model for text in found):
        return Cause.EMA_RESTARTED, "It equals the weights."
    if any(leaf.endswith("n_averaged") for leaf in case.leaves):
        return Cause.EMA_RESTARTED, "Its count of averaged steps differs."
    return Cause.EMA_RESTARTED, "The averages are not those of the reference run."


def _of_data_state(case: Case) -> tuple[Cause, str]:
    for leaf, (found, expected) in case.leaves.items():
        name = leaf.rsplit(".", 1)[-1]
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
    if found and expected and sorted(found.split(",")) == sorted(expected.split(",")):
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
    now, then = found.split(","), expected.split(",")
    if len(now) != len(then):
        return Cause.BATCH_SIZE, f"{len(now)} samples instead of {len(then)}."
    return Cause.ORDER_RESHUFFLED, "The reference run never had this batch."


def _is_same_batch_of_another_epoch(case: Case, step: int) -> bool:
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
    return min(steps) if steps and "epoch" in data else None


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
    return Cause.RNG_LOST, f"{names}: a state that the reference run never recorded."


def _nearest(steps: list[int], step: int) -> int:
    return min(steps, key=lambda each: abs(each - step))


def _of(cause: Cause) -> Callable[[Case], tuple[Cause, str]]:
    def rule(case: Case) -> tuple[Cause, str]:
        older = [step for step in case.common_steps() if step < case.moment.step]
        if older:
            return cause, f"It is that of step {older[-1]}."
        leaf, (found, _) = next(iter(case.leaves.items()))
        if found in ("None", "0", "0.0", "{}", "[]", "False", None):
            return cause, f"{leaf or case.component} is {found or 'absent'}."
        return cause, _differ(len(case.leaves))

    return rule


def _differ(number: int) -> str:
    return "1 value differs." if number == 1 else f"{number} values differ."


_of_other = _of(Cause.UNKNOWN)

# Of a step record: the values of its inputs.
_RULES_OF_INPUTS = {DATA: _of_data, LR: _of_lr, RNG: _of_rng}

# Of a state, by slot.
_RULES = {
    "model": _of_model,
    "optimizer": _of_optimizer,
    "lr_scheduler": _of_lr_scheduler,
    "grad_scaler": _of(Cause.SCALER_RESET),
    "ema": _of_ema,
    "data": _of_data_state,
    "rng": _of_rng,
    "progress": _of(Cause.PROGRESS_LOST),
    "best_metric": _of(Cause.BEST_METRIC_LOST),
    "callbacks": _of(Cause.CALLBACKS_LOST),
    "extras": _of(Cause.EXTRAS_LOST),
}
