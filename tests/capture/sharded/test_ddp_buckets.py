"""The buckets of DistributedDataParallel: read out, and learned again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from resumekit.capture.ddp_buckets import GradientBuckets, bucket_components
from resumekit.capture.model import clean_names
from resumekit.state import Fidelity, StateComponent, common_prefix_change


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Layers(nn.Module):
    """They are used in another order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 1)
        self.first = nn.Linear(4, 8)
        self.frozen = nn.Linear(2, 2).requires_grad_(requires_grad=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(batch)))


def wrapped(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Layers() if module is None else module, **options)


def iterate(module: nn.Module, times: int = 1) -> None:
    for _ in range(times):
        module(torch.ones(3, 4)).sum().backward()


def buckets_of(module: nn.Module) -> GradientBuckets:
    return GradientBuckets(module, key="model/gradient_buckets")


def test_a_new_module_learns_the_order_and_changes_nothing_else() -> None:
    interrupted = wrapped()
    iterate(interrupted, 3)
    state = buckets_of(interrupted).state_dict()
    ((bucket,),) = [each["buckets"] for each in state.values()]
    assert sorted(bucket) == ["first.bias", "first.weight", "last.bias", "last.weight"]
    assert {name.split(".")[0] for name in bucket[:2]} == {"last"}

    resumed = wrapped()
    resumed.module.last.weight.grad = kept = torch.ones(1, 8)
    before = {name: value.clone() for name, value in resumed.state_dict().items()}
    random_state = torch.get_rng_state()
    component = buckets_of(resumed)
    assert component.state_dict() == {}
    component.load_state_dict(state)
    assert component.after_resume() == ()
    assert component.state_dict() == state
    assert resumed.module.last.weight.grad is kept
    assert resumed.module.first.weight.grad is None
    assert all(torch.equal(before[name], value) for name, value in resumed.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())
    iterate(resumed, 2)
    assert component.state_dict() == state


@pytest.mark.parametrize("has_prefix_now", [True, False])
@pytest.mark.parametrize("is_outside", [True, False])
def test_names_follow_a_module_into_another_class(
    *, has_prefix_now: bool, is_outside: bool
) -> None:
    def made(*, has_prefix: bool) -> nn.Module:
        if has_prefix:
            inner = Layers() if is_outside else wrapped()
            holder = nn.Sequential(OrderedDict(model=inner))
            return wrapped(holder) if is_outside else holder
        return wrapped()

    interrupted, resumed = (made(has_prefix=each) for each in (not has_prefix_now, has_prefix_now))
    iterate(interrupted, 3)
    names, live = (clean_names(each, each.state_dict()).values() for each in (interrupted, resumed))
    renaming = common_prefix_change(list(names), list(live))
    assert renaming is not None
    component = buckets_of(resumed)
    component.load_state_dict(component.renamed(buckets_of(interrupted).state_dict(), renaming))
    assert component.after_resume() == ()
    order = [name for each in component.state_dict().values() for name in each["buckets"][0]]
    assert [name.removeprefix("model.").split(".")[0] for name in order[:2]] == ["last", "last"]


def test_the_order_of_the_first_iteration_is_known_before_the_second_begins() -> None:
    module = wrapped()
    iterate(module)
    component = buckets_of(module)
    assert component.state_dict() == {}
    component.before_save()
    early = component.state_dict()
    iterate(module, 3)
    component.before_save()
    assert component.state_dict() == early != {}


def test_modules_inside_a_model_are_found_by_name() -> None:
    model = nn.ModuleDict({"inner": wrapped(), "other": nn.Linear(1, 1)})
    iterate(model["inner"], 3)
    (component,) = bucket_components([StateComponent("model", model)])
    assert component.key == "model/gradient_buckets"
    assert list(component.stateful.state_dict()) == ["inner"]
    assert bucket_components([StateComponent("model", model["other"])]) == ()
    assert bucket_components([StateComponent("ema", model)]) == ()


def test_a_module_that_never_forms_new_buckets_has_none_to_keep() -> None:
    module = wrapped(find_unused_parameters=True)
    iterate(module, 3)
    component = buckets_of(module)
    component.before_save()
    assert component.state_dict() == {}
    assert component.fidelity == (Fidelity.EXACT, "")


def test_buckets_of_a_module_that_formed_some_are_left_out_where_none_are_formed() -> None:
    module = wrapped()
    iterate(module, 3)
    resumed = wrapped(find_unused_parameters=True)
    component = buckets_of(resumed)
    component.load_state_dict(buckets_of(module).state_dict())
    (message,) = component.after_resume()
    assert "with find_unused_parameters=True they stay the first" in message
    iterate(resumed, 2)


def test_other_parameters_are_reported() -> None:
    module = wrapped()
    iterate(module, 3)
    component = buckets_of(wrapped(nn.Linear(4, 1)))
    component.load_state_dict(buckets_of(module).state_dict())
    (message,) = component.after_resume()
    assert "other parameters have gradients than before" in message


def _with_a_hook() -> DistributedDataParallel:
    module = wrapped()
    module.register_comm_hook(None, default_hooks.allreduce_hook)
    return module


def test_what_a_communication_hook_keeps_is_reported_as_lost() -> None:
    module = wrapped()
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    fidelity, reason = buckets_of(module).fidelity
    assert (fidelity, "PowerSGDState" in reason) == (Fidelity.LOST, True)


def _with_a_step_in_backward() -> DistributedDataParallel:
    module = wrapped()
    module.module.last.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return module


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: wrapped(static_graph=True), "static_graph"),
        (_with_a_hook, "communication hook"),
        (_with_a_step_in_backward, "hooks on the gradients"),
        (lambda: wrapped(nn.Embedding(4, 4, sparse=True)), "sparse"),
    ],
)
def test_what_cannot_be_learned_again_is_reported_and_left_alone(make: Any, words: str) -> None:
    module = make()
    component = buckets_of(module)
    fidelity, reason = component.fidelity
    assert fidelity is Fidelity.EQUIVALENT
    assert words in reason
    component.load_state_dict({"": {"buckets": [["last.weight"]]}})
    assert component.after_resume() == ()
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_resumed_module_broadcasts_buffers_where_the_interrupted_one_would() -> None:
    module = wrapped(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    broadcasting = buckets_of(module).state_dict()
    with torch.no_grad():
        module(torch.ones(3, 4))
    silent = buckets_of(module).state_dict()
    assert broadcasting == {"": {"broadcasts_buffers": True}}
    assert silent == {"": {"broadcasts_buffers": False}}
    for state, expected in ((broadcasting, True), (silent, False)):
        component = buckets_of(module)
        component.load_state_dict(state)
        assert component.after_resume() == ()
        assert module.will_sync_module_buffers() is expected


def test_where_no_buffers_are_broadcast_an_evaluation_of_one_rank_changes_no_state() -> None:
    local = wrapped(nn.BatchNorm1d(4))
    local.broadcast_buffers = False
    for module in (wrapped(), local):
        with torch.no_grad():
            module(torch.ones(3, 4))
        assert buckets_of(module).state_dict() == {}


def test_pin_what_is_asked_of_the_wrapper() -> None:
    # torch 2.13 nn/parallel/distributed.py.
    module = wrapped()
    iterate(module, 3)
    logged = module._get_ddp_logging_data()
    numbers = logged["rebuilt_per_bucket_param_indices"].replace(",", " ").split()
    assert sorted(map(int, numbers)) == list(range(logged["num_parameter_tensors"]))
    assert module._has_rebuilt_buckets
    assert module.reducer._rebuild_buckets() is False  # once for a module
    assert (module._comm_hooks, module.mixed_precision, module.static_graph) == ([], None, False)
    assert module.parameters_to_ignore == set()


def test_pin_what_decides_whether_buffers_are_broadcast() -> None:
    # torch 2.13 nn/parallel/distributed.py, _post_forward and will_sync_module_buffers.
    module = wrapped(nn.BatchNorm1d(4))
    assert (module.broadcast_buffers, len(module.modules_buffers)) == (True, 3)
    assert module.require_forward_param_sync is module.will_sync_module_buffers() is True
    with torch.no_grad():
        module(torch.ones(3, 4))
    assert module.require_forward_param_sync is module.will_sync_module_buffers() is False
    module(torch.ones(3, 4))
    assert module.require_forward_param_sync is module.will_sync_module_buffers() is True
