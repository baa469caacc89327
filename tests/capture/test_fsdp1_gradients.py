"""Whether gradients outlive their step, by the storage that they are in."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import _flat_param, _runtime_utils

from resumekit.capture.gradient_watch import StorageWatch


def steps(watch: StorageWatch, model: nn.Module, *, clears: bool | None, count: int = 3) -> None:
    """Some steps; ``clears`` is None for a loop that fills gradients with zeros."""
    for _ in range(count):
        if clears is not False:
            model.zero_grad(set_to_none=clears is True)
        model(torch.ones(2)).sum().backward()
        for each in model.parameters():  # as FSDP1: another tensor object, the same storage
            if each.grad is not None:
                each.grad = each.grad.data
        watch.observe()


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 2)


def watch_of(model: nn.Module) -> StorageWatch:
    return StorageWatch(lambda: list(model.parameters()))


def test_a_loop_that_never_clears_gradients_carries_them(model: nn.Module) -> None:
    watch = watch_of(model)
    steps(watch, model, clears=False, count=1)
    assert watch.must_save
    assert not watch.is_carried
    steps(watch, model, clears=False, count=1)
    assert watch.is_carried


def test_a_loop_that_drops_them_does_not(model: nn.Module) -> None:
    watch = watch_of(model)
    steps(watch, model, clears=True)
    assert not watch.must_save


def test_a_loop_that_stops_dropping_them_does(model: nn.Module) -> None:
    watch = watch_of(model)
    steps(watch, model, clears=True)
    steps(watch, model, clears=False)
    assert watch.must_save


def test_zeros_are_saved_to_be_sure(model: nn.Module) -> None:
    watch = watch_of(model)
    steps(watch, model, clears=None)
    assert watch.must_save


@pytest.mark.parametrize("known", [{"is_carried": True}, {"keeps_zeros": True}, {}])
def test_a_resume_takes_over_what_the_checkpoint_knew(
    model: nn.Module, known: dict[str, Any]
) -> None:
    watch = watch_of(model)
    watch.inherit(**known)
    assert watch.must_save == bool(known)


def test_torch_adds_flat_gradients_in_place() -> None:
    source = inspect.getsource(_runtime_utils._accumulate_sharded_grad)
    assert "flat_param._saved_grad_shard += sharded_grad" in source
    source = inspect.getsource(_flat_param.FlatParamHandle.prepare_gradient_for_backward)
    assert "flat_param._saved_grad_shard = flat_param.grad.data" in source
    for name in ("_reset_flat_param_grad_info_if_needed", "_use_sharded_grad_views"):
        assert callable(getattr(_flat_param.FlatParamHandle, name))
