"""Gradients that outlive a step are found, also under FSDP1."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import _flat_param, _runtime_utils
from torch.nn.parallel import DistributedDataParallel

from resumekit import Checkpointer as BaseCheckpointer
from resumekit import StateComponent
from resumekit.adapters.torch import Checkpointer
from resumekit.capture.gradient_watch import GradientWatch, StorageWatch
from resumekit.capture.model import ModelState
from resumekit.capture.optimizer import OptimizerState


def concluded(
    clear: Callable[[torch.optim.Optimizer], None] | None = None,
    *,
    at: str = "top",
    model: nn.Module | None = None,
    steps: int = 4,
    backward: Callable[[torch.Tensor], None] = torch.Tensor.backward,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> list[bool]:
    """Whether a checkpoint would need gradients, after each step."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)) if model is None else model
    optim = optimizer(model.parameters(), lr=0.01)
    watch = GradientWatch(lambda: list(model.parameters()))
    found = []
    for _ in range(steps):
        if at == "top" and clear is not None:
            clear(optim)
        loss = model(torch.ones(1, 2)).sum()
        if at == "before backward" and clear is not None:
            clear(optim)
        backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optim.step()
        watch.observe()
        found.append(watch.must_save)
    return found


def drop(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()


def fill(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def fill_data(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.data.zero_()


@pytest.mark.parametrize("at", ["top", "before backward"])
@pytest.mark.parametrize("clear", [drop, fill, fill_data])
def test_gradients_that_are_cleared_are_not_needed_after_the_second_step(
    clear: Any, at: str
) -> None:
    assert concluded(clear, at=at) == [True, False, False, False]


def test_gradients_that_are_never_cleared_are_needed() -> None:
    assert concluded() == [True] * 4


def with_graph(loss: torch.Tensor) -> None:
    loss.backward(create_graph=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_not_in_place_sums_are_seen_too() -> None:
    assert concluded(backward=with_graph) == [True] * 4
    assert concluded(drop, backward=with_graph, steps=2) == [True, False]


def test_a_parameter_that_never_has_a_gradient_proves_nothing() -> None:
    class Dead(nn.Module):
        """Its smallest parameter has a gradient of zeros."""

        def __init__(self) -> None:
            super().__init__()
            self.layer, self.dead = nn.Linear(2, 1), nn.Parameter(torch.ones(()))

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch) + 0 * self.dead

    assert concluded(model=Dead()) == [True] * 4


def test_one_parameter_that_is_not_cleared_is_enough() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))

    def drop_first(optimizer: torch.optim.Optimizer) -> None:
        model[0].zero_grad()

    def fill_first(optimizer: torch.optim.Optimizer) -> None:
        model[0].zero_grad(set_to_none=False)

    assert concluded(drop_first, model=model) == [True] * 4
    assert concluded(fill_first, model=model, steps=8)[-1]


def test_a_loop_that_stops_clearing_is_noticed() -> None:
    calls = iter(range(100))

    def sometimes(optimizer: torch.optim.Optimizer) -> None:
        if next(calls) < 4:
            optimizer.zero_grad()

    assert concluded(sometimes, steps=8) == [True, False, False, False, True, True, True, True]


def test_ddps_buckets_as_gradients_are_distinguished_from_a_sum(tmp_path: Any) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:

        def wrapped() -> nn.Module:
            model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
            return DistributedDataParallel(model, gradient_as_bucket_view=True)

        assert concluded(drop, model=wrapped(), steps=6)[-3:] == [False] * 3
        assert concluded(model=wrapped(), steps=6)[-3:] == [True] * 3
    finally:
        torch.distributed.destroy_process_group()


def test_sparse_gradients_are_watched() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(4, 2, sparse=True)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.words(batch.long())

    def loop(clear: Any) -> list[bool]:
        model, found = Words(), []
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        watch = GradientWatch(lambda: list(model.parameters()))
        for _ in range(3):
            if clear is not None:
                clear(optim)
            model(torch.ones(1, 2)).sum().backward()
            optim.step()
            watch.observe()
            found.append(watch.must_save)
        return found

    assert loop(None) == [True] * 3
    assert loop(drop) == [True, False, False]


def test_an_optimizer_that_calls_a_closure_clears_inside_its_step() -> None:
    model = nn.Linear(2, 1)
    optim = torch.optim.LBFGS(model.parameters(), max_iter=2)
    watch = GradientWatch(lambda: list(model.parameters()))

    def closure() -> torch.Tensor:
        optim.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    found = []
    for _ in range(3):
        optim.step(closure)
        watch.observe()
        found.append(watch.must_save)
    assert found == [True, False, False]


def test_hooks_stay_only_where_a_loop_keeps_the_tensor_that_it_clears() -> None:
    for clear, expected in ((drop, 0), (fill, 1)):
        model = nn.Linear(2, 1)
        concluded(clear, model=model)
        hooks = [len(each._backward_hooks or {}) for each in model.parameters()]
        assert sum(hooks) == expected


def test_gradients_that_no_step_needed_stop_no_model_that_keeps_them_elsewhere(
    tmp_path: Path,
) -> None:
    class Engine(ModelState):
        """An optimizer of a framework, whose parameters have no ``.grad``."""

    model = nn.Linear(2, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(tmp_path, model=model, optimizer=optim, save_every=1) as saver:
        for batch in saver.batches([torch.ones(1, 2)] * 3, steps=3):
            optim.zero_grad()
            model(batch).sum().backward()
            optim.step()
            saver.step()
    other = nn.Linear(2, 1)
    optimizer = OptimizerState(torch.optim.SGD(other.parameters(), lr=0.1), {"model": other})
    components = [
        StateComponent("model", Engine(other)),
        StateComponent("optimizer", optimizer),
    ]
    excluded = {"model/attributes"}
    with BaseCheckpointer(tmp_path, components=components, exclude=excluded) as loader:
        report = loader.resume()
    assert report.resumed
    assert torch.equal(other.weight, model.weight)


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


@pytest.mark.parametrize("what", ["nothing", "is_carried", "keeps_zeros"])
def test_a_resume_takes_over_what_the_steps_before_it_have_shown(what: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.zeros(2)
    watch = GradientWatch(lambda: [parameter])
    watch.inherit(is_carried=what == "is_carried", keeps_zeros=what == "keeps_zeros")
    watch.look()
    assert watch.is_carried is watch.must_save is (what == "is_carried")
    assert watch.keeps_zeros is (what == "keeps_zeros")
