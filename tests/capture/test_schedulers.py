"""Every learning-rate scheduler of torch continues with the same bits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from resumekit.capture.scheduler import SchedulerState, horizon
from resumekit.errors import InvalidStateError, StateMismatchError
from resumekit.serialization.digests import state_digest

STEPS_BEFORE, STEPS_AFTER = 4, 8

Make = Callable[[torch.optim.Optimizer], Any]


class WarmUp:
    """A callable object with a setting and a count of its own."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.num_calls = 0

    def __call__(self, step: int) -> float:
        self.num_calls += 1
        return min(1.0, (step + 1) / self.steps) + 0.001 * self.num_calls


def decay(step: int, *, rate: float) -> float:
    return rate**step


def sequential(optimizer: torch.optim.Optimizer) -> schedulers.SequentialLR:
    parts = [
        schedulers.LinearLR(optimizer, total_iters=3),
        schedulers.CosineAnnealingLR(optimizer, T_max=4),
        schedulers.ExponentialLR(optimizer, gamma=0.8),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[3, 7])


def chained(optimizer: torch.optim.Optimizer) -> schedulers.ChainedScheduler:
    parts = [
        schedulers.ConstantLR(optimizer, factor=0.5, total_iters=6),
        schedulers.MultiStepLR(optimizer, milestones=[2, 6], gamma=0.3),
    ]
    return schedulers.ChainedScheduler(parts, optimizer)


MAKERS: dict[str, Make] = {
    "ChainedScheduler": chained,
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.5, total_iters=7),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=9, eta_min=0.01),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.5, step_size_up=3, mode="triangular2"),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, gamma=0.9),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=9),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, milestones=[2, 6, 6]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 1 - step / 100),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.5, total_steps=20),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=10, power=2.0),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, cooldown=1),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=9),
    "SequentialLR": sequential,
    "StepLR": lambda o: schedulers.StepLR(o, step_size=3, gamma=0.5),
}
MORE: dict[str, Make] = {
    "LambdaLR with a callable object": lambda o: schedulers.LambdaLR(o, WarmUp(6)),
    "LambdaLR with a partial": lambda o: schedulers.LambdaLR(o, functools.partial(decay, rate=0.9)),
    "CyclicLR with a callable object": lambda o: schedulers.CyclicLR(
        o, 0.01, 0.5, step_size_up=3, scale_fn=cast(Any, WarmUp(4)), scale_mode="iterations"
    ),
    "SWALR linear": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=9, anneal_strategy="linear"),
    "OneCycleLR in three phases": lambda o: schedulers.OneCycleLR(
        o, max_lr=0.5, epochs=4, steps_per_epoch=5, three_phase=True
    ),
}
ALL = {**MAKERS, **MORE}
BASES = {"LRScheduler", "_LRScheduler"}


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    layers = list(model.children())
    groups: Any = [
        {"params": [p for layer in layers[:2] for p in layer.parameters()]},
        {"params": [p for layer in layers[2:] for p in layer.parameters()], "lr": 0.2},
    ]
    return SGD(groups, lr=0.1, momentum=0.9)


def make_tensor_lr_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = make_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    return optimizer


def scheduled(job: Any, make: Make, *, seed: int = 0, tensor_lr: bool = False) -> Any:
    running = job(make_tensor_lr_optimizer if tensor_lr else make_optimizer, make, seed=seed)
    running.states["lr_scheduler"] = SchedulerState(running.scheduler)
    return running


def fresh(make: Make) -> SchedulerState:
    return SchedulerState(make(make_optimizer(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))))


def test_every_scheduler_class_of_this_torch_is_tested() -> None:
    found = {
        name
        for name, value in vars(schedulers).items()
        if inspect.isclass(value) and issubclass(value, schedulers.LRScheduler)
    }
    assert found - BASES | {"SWALR"} == set(MAKERS)


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float lr", "tensor lr"])
@pytest.mark.parametrize("name", sorted(ALL))
def test_a_scheduler_continues_bit_for_bit(
    name: str, tensor_lr: bool, job: Any, stored: Any, assert_same: Any
) -> None:
    uninterrupted = scheduled(job, ALL[name], tensor_lr=tensor_lr)
    uninterrupted.train(STEPS_BEFORE)
    saved = stored(uninterrupted.save())
    expected = uninterrupted.train(STEPS_AFTER)
    assert len({lr for _, *lrs in expected for lr in lrs}) > 2, "nothing is scheduled here"

    resumed = scheduled(job, ALL[name], seed=1, tensor_lr=tensor_lr)
    lrs = [group["lr"] for group in resumed.optimizer.param_groups]
    resumed.load(saved)
    assert resumed.train(STEPS_AFTER) == expected
    assert_same(resumed.save(), uninterrupted.save())
    if tensor_lr:
        assert all(g["lr"] is lr for g, lr in zip(resumed.optimizer.param_groups, lrs, strict=True))


@pytest.mark.parametrize("name", sorted(ALL))
def test_a_scheduler_does_not_continue_when_it_is_left_out(
    name: str, job: Any, stored: Any
) -> None:
    uninterrupted = scheduled(job, ALL[name])
    uninterrupted.train(STEPS_BEFORE)
    saved = stored(uninterrupted.save())
    expected = uninterrupted.train(STEPS_AFTER)

    resumed = scheduled(job, ALL[name], seed=1)
    resumed.load(saved, leave_out="lr_scheduler")
    found = resumed.train(STEPS_AFTER)
    then, now = (stored(each.save()["lr_scheduler"]) for each in (uninterrupted, resumed))
    assert state_digest(then) != state_digest(now)
    if name != "ExponentialLR":  # its next rate follows from the last one, the optimizer's, alone
        assert [lrs for _, *lrs in found] != [lrs for _, *lrs in expected]


def test_the_loaded_state_is_neither_shared_nor_changed(stored: Any, assert_same: Any) -> None:
    for name, make in ALL.items():
        saved = stored(fresh(make).state_dict())
        before = stored(saved)
        live = fresh(make)
        live.load_state_dict(saved)
        live.scheduler.last_epoch = 99
        for part in getattr(live.scheduler, "_schedulers", ()):
            part.last_epoch = 99
        assert_same(saved, before)
        if "base_lrs" in saved["state"]:
            assert live.scheduler.base_lrs is not saved["state"]["base_lrs"], name


# Refused.


def refused(live: SchedulerState, saved: Any) -> str:
    with pytest.raises(StateMismatchError) as caught:
        live.check_state_dict(saved)
    assert caught.value.remedy
    return str(caught.value)


def test_another_class_is_refused_with_both_names(stored: Any) -> None:
    saved = stored(fresh(MAKERS["StepLR"]).state_dict())
    message = refused(fresh(MAKERS["ExponentialLR"]), saved)
    assert "lr_scheduler.StepLR" in message
    assert "lr_scheduler.ExponentialLR" in message


def test_another_part_of_a_composed_schedule_is_refused(stored: Any) -> None:
    def other(optimizer: torch.optim.Optimizer) -> schedulers.SequentialLR:
        parts: Any = [schedulers.LinearLR(optimizer) for _ in range(3)]
        return schedulers.SequentialLR(optimizer, parts, milestones=[3, 7])

    saved = stored(fresh(sequential).state_dict())
    message = refused(fresh(other), saved)
    assert "_schedulers[1]" in message
    assert "CosineAnnealingLR" in message

    def shorter(optimizer: torch.optim.Optimizer) -> schedulers.SequentialLR:
        parts = [schedulers.LinearLR(optimizer), schedulers.CosineAnnealingLR(optimizer, 4)]
        return schedulers.SequentialLR(optimizer, parts, milestones=[3])

    message = refused(fresh(shorter), saved)
    assert "_schedulers[2]" in message
    assert "ExponentialLR in the checkpoint, expected nothing" in message


def test_another_number_of_groups_is_refused(stored: Any) -> None:
    saved = stored(fresh(MAKERS["StepLR"]).state_dict())
    model = nn.Linear(1, 1)
    one_group = SchedulerState(MAKERS["StepLR"](SGD(model.parameters(), lr=0.1)))
    assert "base_lrs: 2 entries, expected 1" in refused(one_group, saved)


def test_a_callable_object_on_one_side_only_is_refused(stored: Any) -> None:
    with_object = fresh(MORE["LambdaLR with a callable object"])
    with_function = fresh(MAKERS["LambdaLR"])
    assert "lr_lambdas" in refused(with_function, stored(with_object.state_dict()))
    assert "lr_lambdas" in refused(with_object, stored(with_function.state_dict()))


@pytest.mark.parametrize("state", [None, {}, {"classes": 3}, {"classes": {}}])
def test_what_is_no_scheduler_state_is_refused(state: Any) -> None:
    with pytest.raises(InvalidStateError, match="lr_scheduler"):
        fresh(sequential).check_content("lr_scheduler", state)


def test_an_attribute_that_the_checkpoint_lacks_stays_as_built_and_is_reported(stored: Any) -> None:
    saved = stored(fresh(MAKERS["StepLR"]).state_dict())
    del saved["state"]["gamma"]
    live = fresh(MAKERS["StepLR"])
    live.check_state_dict(saved)
    assert live.load_state_dict(saved) == ("gamma is not in the checkpoint and stays as built",)
    assert live.scheduler.gamma == 0.5


# The horizon.

BASE_STEPS = 30


class Settings:
    """What a script parses its arguments into."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps


def closed_over(steps: int) -> Callable[[int], float]:
    return lambda step: 1 - step / steps


def in_settings(steps: int) -> Callable[[int], float]:
    settings = Settings(steps)
    return lambda step: 1 - step / settings.max_steps


class Trainer:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def factor(self, step: int) -> float:
        return 1 - step / self.steps


def linear(step: int, *, num_training_steps: int) -> float:
    return 1 - step / num_training_steps


def with_default(num_steps: int) -> Callable[[int], float]:
    def factor(step: int, last: int = num_steps) -> float:
        return 1 - step / last

    return factor


LENGTHS: dict[str, Callable[[int], Make]] = {
    "T_max": lambda n: lambda o: schedulers.CosineAnnealingLR(o, T_max=n),
    "T_0": lambda n: lambda o: schedulers.CosineAnnealingWarmRestarts(o, T_0=n),
    "total_iters": lambda n: lambda o: schedulers.LinearLR(o, total_iters=n),
    "total_iters of a polynomial": lambda n: lambda o: schedulers.PolynomialLR(o, total_iters=n),
    "milestones": lambda n: lambda o: schedulers.MultiStepLR(o, milestones=[5, n]),
    "step_size": lambda n: lambda o: schedulers.StepLR(o, step_size=n),
    "total_steps": lambda n: lambda o: schedulers.OneCycleLR(o, max_lr=0.5, total_steps=n),
    "step_size_up": lambda n: lambda o: schedulers.CyclicLR(o, 0.01, 0.5, step_size_up=n),
    "anneal_epochs": lambda n: lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=n),
    "a part": lambda n: (
        lambda o: schedulers.ChainedScheduler([schedulers.LinearLR(o, total_iters=n)])
    ),
    "a milestone between parts": lambda n: (
        lambda o: schedulers.SequentialLR(
            o, [schedulers.ConstantLR(o), schedulers.ConstantLR(o)], milestones=[n]
        )
    ),
    "a closure": lambda n: lambda o: schedulers.LambdaLR(o, closed_over(n)),
    "an attribute": lambda n: lambda o: schedulers.LambdaLR(o, in_settings(n)),
    "a method": lambda n: lambda o: schedulers.LambdaLR(o, Trainer(n).factor),
    "a partial": lambda n: (
        lambda o: schedulers.LambdaLR(o, functools.partial(linear, num_training_steps=n))
    ),
    "a default": lambda n: lambda o: schedulers.LambdaLR(o, with_default(n)),
    "a callable object": lambda n: lambda o: schedulers.LambdaLR(o, WarmUp(n)),
}


@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_the_horizon_distinguishes_lengths(name: str) -> None:
    short, same, longer = (
        horizon(fresh(LENGTHS[name](n)).scheduler) for n in (BASE_STEPS, BASE_STEPS, 40)
    )
    assert short
    assert short == same
    assert short != longer


@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_the_horizon_does_not_change_while_a_schedule_is_running(name: str, job: Any) -> None:
    running = scheduled(job, LENGTHS[name](BASE_STEPS))
    before = horizon(running.scheduler)
    running.train(STEPS_BEFORE)
    assert horizon(running.scheduler) == before


def test_what_is_no_length_is_a_setting() -> None:
    found = fresh(lambda o: schedulers.ReduceLROnPlateau(o, patience=7)).fingerprint()
    assert found["horizon"] == {}
    assert found["settings"]["patience"] == 7
    found = fresh(MAKERS["CosineAnnealingLR"]).fingerprint()
    assert found["horizon"] == {"T_max": 9}
    assert found["settings"]["eta_min"] == 0.01
    assert found["classes"] == {"": "torch.optim.lr_scheduler.CosineAnnealingLR"}


@pytest.mark.parametrize("keep", [False, True], ids=["the old horizon", "the new horizon"])
@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_an_allowed_change_of_the_horizon_keeps_what_this_run_built(
    name: str, keep: bool, stored: Any
) -> None:
    old, new = fresh(LENGTHS[name](BASE_STEPS)), fresh(LENGTHS[name](40))
    old.scheduler.last_epoch = 11
    new_horizon = horizon(new.scheduler)
    new.keep_horizon = keep
    saved = stored(old.state_dict())
    new.check_state_dict(saved)
    new.load_state_dict(saved)
    is_code = name in {"a closure", "an attribute", "a method", "a partial", "a default"}
    assert (horizon(new.scheduler) == new_horizon) is (keep or is_code)
    if "last_epoch" in saved["state"]:
        assert new.scheduler.last_epoch == 11


def test_of_a_scheduler_of_ones_own_every_whole_number_is_a_length() -> None:
    class Custom(schedulers.LambdaLR):
        def __init__(self, optimizer: torch.optim.Optimizer, *, warm: int, power: float) -> None:
            self.warm, self.power, self.late = warm, power, 3
            super().__init__(optimizer, lambda step: min(1.0, step / warm) ** power)

    found = fresh(lambda o: Custom(o, warm=7, power=2.0)).fingerprint()
    assert found["horizon"]["warm"] == 7
    assert found["settings"]["power"] == 2.0
    assert "late" not in found["horizon"]
