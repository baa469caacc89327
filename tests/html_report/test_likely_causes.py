"""The cause that is named for each thing that a resume can lose.

The table runs a small training loop in plain Python, whose resume is wrong in one known way, from
random stops. Below it, torch trains: with a resume by hand, and with a Checkpointer.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from resumekit.prove.causes import Cause, Finding, find_causes
from resumekit.record.moments import Launch, Moment, Recording, of_trace, read_trace

BATCHES, EPOCHS, SAVE_EVERY = 6, 4, 4
LAST = BATCHES * EPOCHS


@dataclass
class State:
    """All that the loop carries from step to step."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    order_seed: int = 7
    batch_size: int = 2
    weights: list[float] = field(default_factory=lambda: [0.5, -0.25])
    running_mean: float = 0.0
    moments: list[float] = field(default_factory=lambda: [0.0, 0.0])
    decay: float = 0.9
    updates: int = 0
    lr_step: int = 0
    lr_scale: float = 1.0
    ema: list[float] = field(default_factory=lambda: [0.5, -0.25])
    scale: float = 1024.0
    gradients: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    best: float | None = None
    bad_epochs: int = 0
    seen: int = 0
    curriculum: float = 1.0  # in no checkpoint

    def texts(self) -> dict[str, dict[str, str]]:
        """Each component as a checkpoint has it."""
        return {
            "model": {
                "0.weight": str(self.weights[0]),
                "1.weight": str(self.weights[1]),
                "norm.running_mean": str(self.running_mean),
            },
            "optimizer": {
                "state.0.momentum": str(self.moments[0]),
                "state.1.momentum": str(self.moments[1]),
                "state.0.step": str(self.updates),
                "param_groups[0].decay": str(self.decay),
            },
            "lr_scheduler": {"state.last_epoch": str(self.lr_step)},
            "ema": {"weights.0": str(self.ema[0]), "weights.1": str(self.ema[1])},
            "grad_scaler": {"scale": str(self.scale)},
            "model/gradients": {"gradients.0": str(self.gradients)},
            "data": {"epoch": str(self.epoch), "batch": str(self.batch)},
            "rng": {"python": str(hash(self.rng.getstate()))},
            "progress": {"step": str(self.step)},
            "best_metric": {"value": str(self.best)},
            "callbacks": {"bad_epochs": str(self.bad_epochs)},
            "extras": {"seen": str(self.seen)},
        }


def one_step(state: State) -> Moment:
    """One optimizer step, as a trace records it."""
    order = list(range(BATCHES * 2))
    random.Random(state.order_seed + state.epoch).shuffle(order)
    ids = order[state.batch * 2 :][: state.batch_size]
    data = {
        "epoch": str(state.epoch),
        "batch": str(state.batch),
        "samples": ",".join(map(str, ids)),
    }
    noise = state.rng.random()
    lr = state.lr_scale * 0.1 * 0.97**state.lr_step
    loss = sum((each - one / 20) ** 2 for one in ids for each in state.weights) * state.curriculum
    loss += noise * 1e-3 + state.running_mean * 1e-4
    for index, weight in enumerate(state.weights):
        gradient = 2 * weight - ids[0] / 20 + noise * 1e-3 + state.gradients
        state.moments[index] = state.decay * state.moments[index] + gradient
        state.weights[index] -= lr * state.moments[index]
        state.ema[index] = 0.9 * state.ema[index] + 0.1 * state.weights[index]
    state.running_mean = 0.9 * state.running_mean + loss
    state.gradients = loss * 1e-3
    state.scale *= 1.001
    state.curriculum *= 1.01
    state.step, state.updates = state.step + 1, state.updates + 1
    state.lr_step, state.seen = state.lr_step + 1, state.seen + len(ids)
    state.bad_epochs += loss > 0.1
    state.best = loss if state.best is None else min(loss, state.best)
    state.epoch, state.batch = divmod(state.epoch * BATCHES + state.batch + 1, BATCHES)
    parts = {
        "data": data,
        "lr": {"group0": str(lr)},
        "rng": {"python": str(hash(state.rng.getstate()))},
        "loss": {"": str(loss)},
    }
    return Moment("step", state.step, parts, ("loss",))


def launch(state: State, *, stop: int, saves: list[State], resumed: bool = False) -> Launch:
    moments = []
    if resumed:
        moments.append(Moment("resumed", state.step, state.texts()))
    while state.step < min(stop, LAST) and state.epoch < EPOCHS:
        moments.append(one_step(state))
        if state.step % SAVE_EVERY == 0:
            saves.append(copy.deepcopy(state))
            moments.append(Moment("checkpoint", state.step, state.texts()))
    return tuple(moments)


Fault = Callable[[State, State, State], None]  # restored state, fresh state, an older save


def runs(fault: Fault | None, *, stop: int) -> tuple[Recording, Recording]:
    """The reference run, and one that stops once and resumes wrongly."""
    reference = Recording({0: launch(State(), stop=LAST, saves=[])})
    saves: list[State] = []
    first = launch(State(), stop=stop, saves=saves)
    state = copy.deepcopy(saves[-1])
    if fault is not None:
        fault(state, State(), copy.deepcopy(saves[0]))
    second = launch(state, stop=LAST, saves=[], resumed=True)
    return reference, Recording({0: first, 1: second})


def without_states(recording: Recording) -> Recording:
    """The same without components, as a script records it that has no Checkpointer."""
    return Recording(
        {
            number: tuple(each for each in moments if each.kind == "step")
            for number, moments in recording.launches.items()
        }
    )


def roots(findings: tuple[Finding, ...]) -> list[Finding]:
    return [each for each in findings if each.cause is not Cause.CONSEQUENCE]


def take(*names: str) -> Fault:
    """Some of the fields are those of a fresh start."""

    def fault(state: State, fresh: State, older: State) -> None:
        for name in names:
            setattr(state, name, getattr(fresh, name))

    return fault


def take_older(*names: str) -> Fault:
    """Some of the fields are those of the first save."""

    def fault(state: State, fresh: State, older: State) -> None:
        for name in names:
            setattr(state, name, getattr(older, name))

    return fault


def change(**values: Any) -> Fault:
    def fault(state: State, fresh: State, older: State) -> None:
        for name, value in values.items():
            setattr(state, name, value)

    return fault


def one_weight(state: State, fresh: State, older: State) -> None:
    state.weights[1] = 0.125


def ema_of_weights(state: State, fresh: State, older: State) -> None:
    state.ema = list(state.weights)


def draw(state: State, fresh: State, older: State) -> None:
    state.rng.random()


def behind(state: State, fresh: State, older: State) -> None:
    state.batch -= 1


def skip(state: State, fresh: State, older: State) -> None:
    state.batch += 1


# What a checkpoint is missing, and what the report says.
OF_STATES: dict[str, tuple[Fault, str, Cause]] = {
    "weights": (change(weights=[0.1, 0.2], running_mean=0.5), "model", Cause.WEIGHTS_RESTARTED),
    "older weights": (take_older("weights", "running_mean"), "model", Cause.WEIGHTS_OLDER),
    "one weight": (one_weight, "model", Cause.WEIGHTS_PARTLY),
    "buffers": (take("running_mean"), "model", Cause.BUFFERS_LOST),
    "optimizer": (take("moments", "updates"), "optimizer", Cause.OPTIMIZER_COLD),
    "older optimizer": (take_older("moments", "updates"), "optimizer", Cause.OPTIMIZER_OLDER),
    "settings": (change(decay=0.8), "optimizer", Cause.OPTIMIZER_SETTINGS),
    "gradients": (change(gradients=0.0), "model/gradients", Cause.GRADIENTS_LOST),
    "lr": (take("lr_step"), "lr_scheduler", Cause.LR_RESTARTED),
    "older lr": (take_older("lr_step"), "lr_scheduler", Cause.LR_SHIFTED),
    "ema": (ema_of_weights, "ema", Cause.EMA_RESTARTED),
    "scaler": (take("scale"), "grad_scaler", Cause.SCALER_RESET),
    "data": (take("epoch", "batch"), "data", Cause.DATA_RESTARTED),
    "epoch": (change(batch=0), "data", Cause.EPOCH_RESTARTED),
    "rng": (take("rng"), "rng", Cause.RNG_LOST),
    "older rng": (take_older("rng"), "rng", Cause.RNG_BEHIND),
    "best metric": (take("best"), "best_metric", Cause.BEST_METRIC_LOST),
    "callbacks": (take("bad_epochs"), "callbacks", Cause.CALLBACKS_LOST),
    "extras": (take("seen"), "extras", Cause.EXTRAS_LOST),
    "variable": (take("curriculum"), "loss", Cause.UNSAVED_VARIABLE),
}

# The same for a script that records its steps only.
OF_STEPS: dict[str, tuple[Fault, str, Cause]] = {
    "lr": (take("lr_step"), "lr", Cause.LR_RESTARTED),
    "older lr": (take_older("lr_step"), "lr", Cause.LR_SHIFTED),
    "other lr": (change(lr_scale=0.5), "lr", Cause.LR_CHANGED),
    "data": (take("epoch", "batch"), "data", Cause.DATA_RESTARTED),
    "epoch": (change(batch=0), "data", Cause.EPOCH_RESTARTED),
    "repeated": (behind, "data", Cause.SAMPLES_REPEATED),
    "skipped": (skip, "data", Cause.SAMPLES_SKIPPED),
    "order": (change(order_seed=99), "data", Cause.ORDER_RESHUFFLED),
    "order of the epoch before": (change(order_seed=6), "data", Cause.EPOCH_ORDER),
    "batch size": (change(batch_size=1), "data", Cause.BATCH_SIZE),
    "rng": (take("rng"), "rng", Cause.RNG_RESTARTED),
    "older rng": (take_older("rng"), "rng", Cause.RNG_BEHIND),
    "drawn rng": (draw, "rng", Cause.RNG_AHEAD),
    "reseeded rng": (change(rng=random.Random(9)), "rng", Cause.RNG_LOST),
    "variable": (take("curriculum"), "loss", Cause.UNSAVED_VARIABLE),
}

# Inside an epoch, and a save after the first one.
STOPS = random.Random(5).sample([9, 10, 11, 16, 17, 20, 21, 22, 23], 4)


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", OF_STATES)
def test_what_a_checkpoint_lacks_is_named(name: str, stop: int) -> None:
    fault, component, cause = OF_STATES[name]
    found = roots(find_causes(*runs(copy.deepcopy(fault), stop=stop)))
    assert (found[0].component, found[0].cause) == (component, cause), found
    assert len(found) == 1


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("name", OF_STEPS)
def test_what_a_script_without_checkpointer_loses_is_named(name: str, stop: int) -> None:
    fault, component, cause = OF_STEPS[name]
    reference, judged = runs(copy.deepcopy(fault), stop=stop)
    found = roots(find_causes(without_states(reference), without_states(judged)))
    assert (found[0].component, found[0].cause) == (component, cause), found
    assert len(found) == 1


@pytest.mark.parametrize("stop", STOPS)
def test_an_exact_resume_has_no_finding(stop: int) -> None:
    judged = runs(None, stop=stop)
    judged[1].launches[1]  # it has resumed
    found = find_causes(*judged)
    # the variable that is in no checkpoint differs, and nothing else
    assert [each.component for each in roots(found)] in ([], ["loss"])


def test_two_losses_at_once_are_two_causes() -> None:
    def fault(state: State, fresh: State, older: State) -> None:
        state.moments, state.updates, state.rng = fresh.moments, fresh.updates, fresh.rng

    found = roots(find_causes(*runs(fault, stop=10)))
    assert {each.cause for each in found} == {Cause.OPTIMIZER_COLD, Cause.RNG_LOST}


def test_order_inside_a_batch_is_no_new_order() -> None:
    reference, judged = map(without_states, runs(None, stop=10))
    first = judged.launches[1][0]
    data = first.parts["data"]
    turned = {**data, "samples": ",".join(reversed(data["samples"].split(",")))}
    changed = replace(first, parts={**first.parts, "data": turned})
    (finding,) = find_causes(reference, Recording({**judged.launches, 1: (changed,)}))[:1]
    assert finding.cause is Cause.BATCH_ORDER


def test_a_launch_from_the_first_step_was_never_resumed() -> None:
    again = launch(State(), stop=LAST, saves=[])
    reference = Recording({0: again})
    (finding,) = find_causes(reference, Recording({0: again[:9], 1: again}))
    assert finding.cause is Cause.NEVER_RESUMED
    assert "had trained" in finding.evidence


def test_steps_that_no_launch_trained_are_named() -> None:
    moments = launch(State(), stop=LAST, saves=[])
    steps = tuple(each for each in moments if each.kind == "step")
    judged = Recording({0: steps[:8], 1: steps[10:]})
    finding, *others = find_causes(Recording({0: steps}), judged)
    assert not others
    assert finding.cause is Cause.STEPS_SKIPPED
    assert finding.evidence == "No launch trained the steps 9 to 10."


def test_a_launch_that_ended_before_its_first_step_is_judged_by_what_it_restored() -> None:
    """It was killed there, or the step failed."""
    steps = [Moment("step", step, {"parameters": {"w": str(step)}}) for step in range(1, 10)]
    reference = Recording({0: tuple(steps)})
    for weight, causes in (("5", []), ("3", [Cause.WEIGHTS_OLDER])):
        restored = Moment("restored", 5, {"parameters": {"w": weight}})
        judged = Recording({0: tuple(steps[:5]), 1: (restored,)}, was_ended=True)
        assert [each.cause for each in find_causes(reference, judged)] == causes


def test_a_difference_before_the_first_stop_is_no_fault_of_a_resume() -> None:
    reference = Recording({0: launch(State(), stop=LAST, saves=[])})
    other = Recording({0: launch(State(order_seed=8), stop=LAST, saves=[])})
    assert {each.cause for each in find_causes(reference, other)} == {Cause.NOT_REPRODUCIBLE}


# ---------------------------------------------------------------- torch


class StopError(Exception):
    """Ends a launch."""


def traced(
    directory: Path, monkeypatch: pytest.MonkeyPatch, launches: list[Callable[[], None]]
) -> Recording:
    """What these launches trace, one after another."""
    for number, run in enumerate(launches):
        monkeypatch.setenv("RESUMEKIT_TRACE", str(directory / f"launch-{number:05d}"))
        run()
    monkeypatch.delenv("RESUMEKIT_TRACE")
    return of_trace(read_trace(directory)[0])


@pytest.fixture
def plain_training(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script whose resume is wrong in one known way."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "prove" / "scripts")
    sys.modules.pop("plain_training", None)
    import plain_training  # type: ignore[import-not-found]

    return plain_training


@pytest.mark.parametrize(
    ("wrong", "causes"),
    [
        ("", set()),
        ("model", {Cause.WEIGHTS_RESTARTED}),
        ("optimizer", {Cause.OPTIMIZER_COLD}),
        ("lr", {Cause.LR_RESTARTED}),
        ("rng", {Cause.RNG_RESTARTED}),
        ("order", {Cause.ORDER_RESHUFFLED}),
        ("step", {Cause.STEPS_SKIPPED}),
        ("everything", {Cause.NEVER_RESUMED}),
    ],
)
def test_a_resume_by_hand_is_judged_by_what_it_forgets(
    plain_training: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: str,
    causes: set[Cause],
) -> None:
    save = plain_training.save

    def save_and_stop(directory: Path, live: dict[str, Any], rank: int, step: int) -> None:
        save(directory, live, rank, step)
        if step == 8 and directory.name == "stopped":
            raise StopError

    monkeypatch.setattr(plain_training, "save", save_and_stop)
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()

    def stopped() -> None:
        with pytest.raises(StopError):
            plain_training.train(str(tmp_path / "stopped"))

    def resumed() -> None:
        monkeypatch.setattr(plain_training, "save", save)
        plain_training.train(str(tmp_path / "stopped"), wrong=wrong)

    whole = [lambda: plain_training.train(str(tmp_path / "whole"))]
    reference = traced(tmp_path / "trace-whole", monkeypatch, whole)
    judged = traced(tmp_path / "trace-stopped", monkeypatch, [stopped, resumed])
    found = roots(find_causes(reference, judged))
    assert {each.cause for each in found} == causes, found


@pytest.mark.parametrize(
    ("component", "cause"),
    [
        ("", None),
        ("model", Cause.WEIGHTS_RESTARTED),
        ("optimizer", Cause.OPTIMIZER_COLD),
        ("data", Cause.DATA_RESTARTED),
        ("rng", Cause.RNG_LOST),
    ],
)
def test_what_a_checkpointer_leaves_out_is_named(
    train: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    component: str,
    cause: Cause | None,
) -> None:
    def resumed() -> None:
        monkeypatch.setenv("RESUMEKIT_INJECT", component)
        train(tmp_path / "run")

    whole = traced(tmp_path / "a", monkeypatch, [lambda: train(tmp_path / "whole")])
    launches = [lambda: train(tmp_path / "run", until=11), resumed]
    found = roots(find_causes(whole, traced(tmp_path / "b", monkeypatch, launches)))
    assert [(each.component, each.cause) for each in found] == (
        [] if cause is None else [(component, cause)]
    )
