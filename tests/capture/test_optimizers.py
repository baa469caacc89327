"""Every optimizer of torch continues bit for bit after its state went through storage."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

STEPS_BEFORE, STEPS_AFTER = 3, 5

# Arguments that make each optimizer keep all the state that it can keep.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.05, "lambd": 0.1, "t0": 2.0},
    "Adadelta": {},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1},
    "Adam": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Adamax": {},
    "LBFGS": {"lr": 0.5, "max_iter": 3, "history_size": 4},
    "Muon": {"lr": 0.01},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"lr": 0.01, "momentum": 0.9, "centered": True},
    "Rprop": {},
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    "SparseAdam": {},
}
CLASSES = {
    name: value
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    and value is not torch.optim.Optimizer
}
ONE_GROUP_ONLY = {"LBFGS"}


def maker(name: str, **more: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Builds the optimizer over the parameters that it can update, in two groups where it may."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        parameters = dict(model.named_parameters())
        if name == "SparseAdam":
            parameters = {"embedding.weight": parameters["embedding.weight"]}
        elif name == "Muon":
            parameters = {n: p for n, p in parameters.items() if p.ndim == 2}
        everything = list(parameters.values())
        groups: list[Any] = everything
        if name not in ONE_GROUP_ONLY and len(everything) > 1:
            second = {"params": everything[2:], "lr": 0.02, "of_my_own": "head"}
            groups = [{"params": everything[:2]}, second]
        return CLASSES[name](groups, **{**ARGUMENTS[name], **more})

    return make


def test_every_optimizer_class_of_this_torch_is_tested() -> None:
    assert set(CLASSES) == set(ARGUMENTS)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_optimizer_continues_bit_for_bit(
    name: str, job: Any, stored: Any, assert_same: Any
) -> None:
    sparse = name == "SparseAdam"
    uninterrupted = job(maker(name), sparse=sparse)
    uninterrupted.train(STEPS_BEFORE)
    saved = stored(uninterrupted.save())
    before = stored(uninterrupted.optimizer.state_dict())
    expected = uninterrupted.train(STEPS_AFTER)

    resumed = job(maker(name), seed=1, sparse=sparse)
    resumed.load(saved)
    assert_same(resumed.optimizer.state_dict(), before)
    assert resumed.train(STEPS_AFTER) == expected
    assert_same(resumed.save(), uninterrupted.save())


@pytest.mark.parametrize("left_out", ["model", "optimizer", "rng"])
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_an_optimizer_does_not_continue_when_a_part_is_left_out(
    name: str, left_out: str, job: Any, stored: Any
) -> None:
    sparse = name == "SparseAdam"
    uninterrupted = job(maker(name), sparse=sparse)
    uninterrupted.train(STEPS_BEFORE)
    saved = stored(uninterrupted.save())
    expected = uninterrupted.train(STEPS_AFTER)

    resumed = job(maker(name), seed=1, sparse=sparse)
    resumed.load(saved, leave_out=left_out)
    assert resumed.train(STEPS_AFTER) != expected


VARIANTS = [
    pytest.param("AdamW", {"foreach": True}, id="foreach"),
    pytest.param("AdamW", {"foreach": False}, id="for loop"),
    pytest.param("AdamW", {"fused": True}, id="fused"),
    pytest.param("SGD", {"fused": True}, id="fused SGD"),
    pytest.param("Adagrad", {"fused": True}, id="fused Adagrad"),
    pytest.param("Adam", {"lr": torch.tensor(0.01), "foreach": False}, id="tensor lr"),
    pytest.param("AdamW", {"lr": torch.tensor(0.01), "fused": True}, id="tensor lr, fused"),
    pytest.param("Adam", {"maximize": True}, id="maximize"),
    pytest.param("LBFGS", {"line_search_fn": "strong_wolfe"}, id="line search"),
]


@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
def test_a_variant_of_an_optimizer_continues_bit_for_bit(
    name: str, arguments: dict[str, Any], job: Any, stored: Any, assert_same: Any
) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        values = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        return maker(name, **values)(model)

    uninterrupted = job(make)
    uninterrupted.train(STEPS_BEFORE)
    saved = stored(uninterrupted.save())
    expected = uninterrupted.train(STEPS_AFTER)

    resumed = job(make, seed=1)
    resumed.load(saved)
    assert resumed.train(STEPS_AFTER) == expected
    assert_same(resumed.save(), uninterrupted.save())
    without = job(make, seed=1)
    without.load(saved, leave_out="optimizer")
    assert without.train(STEPS_AFTER) != expected


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_checkpoint_before_the_first_step_changes_nothing(
    name: str, job: Any, stored: Any, assert_same: Any
) -> None:
    sparse = name == "SparseAdam"
    untouched, saving = (job(maker(name), sparse=sparse) for _ in range(2))
    torch.manual_seed(5)
    saved = stored(saving.save())
    expected = saving.train(STEPS_AFTER)
    torch.manual_seed(5)
    assert untouched.train(STEPS_AFTER) == expected
    resumed = job(maker(name), seed=1, sparse=sparse)
    resumed.load(saved)
    assert resumed.train(STEPS_AFTER) == expected


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_loading_goes_back_in_an_optimizer_that_has_stepped_on(
    name: str, job: Any, stored: Any
) -> None:
    running = job(maker(name), sparse=name == "SparseAdam")
    running.train(1)
    saved = stored(running.save())
    expected = running.train(STEPS_AFTER)
    running.load(saved)
    assert running.train(STEPS_AFTER) == expected
