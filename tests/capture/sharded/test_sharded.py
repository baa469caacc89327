"""Models and optimizers whose tensors are sharded: their names, pattern and moments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from resumekit import Checkpointer
from resumekit.capture.gradients import require_gradients
from resumekit.capture.model import ModelState
from resumekit.capture.optimizer import OptimizerState, pairs_of
from resumekit.capture.slots import parameter_components, rank_buffer_components, state_components
from resumekit.errors import ConfigurationError, StateMismatchError
from resumekit.state import SharingPattern, StateComponent


@pytest.fixture(autouse=True)
def _a_job_of_one_rank() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.body = nn.Sequential(first, second)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = second.weight
        self.norm = nn.BatchNorm1d(6)
        self.unused = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.tied(self.body(x)))
        return out


def sharded() -> Any:
    model: Any = Model()
    return fully_shard(model)


def stepped(model: Any, kind: Any = torch.optim.AdamW) -> Any:
    optimizer = kind(model.parameters(), lr=0.01)
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def on_meta(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.empty(state.shape, dtype=state.dtype, device="meta")
    if isinstance(state, dict):
        return {key: on_meta(value) for key, value in state.items()}
    return [on_meta(value) for value in state] if isinstance(state, list) else state


def test_after_an_evaluation_the_optimizer_still_trains_parameters_of_the_model() -> None:
    model = sharded()
    optimizer = stepped(model)
    with torch.no_grad():
        model(torch.randn(4, 6))
    whole = set(map(id, model.parameters()))
    assert not whole & {id(each) for group in optimizer.param_groups for each in group["params"]}
    components = state_components(model=model, optimizer=optimizer)
    assert parameter_components(components) == ()


def test_the_names_are_those_of_get_state_dict() -> None:
    model = sharded()
    optimizer = stepped(model)
    of_optimizer: Any
    of_model, of_optimizer = get_state_dict(model, optimizer)
    ours = OptimizerState(optimizer, {"model": model}).state_dict()
    assert list(ModelState(model).state_dict()) == list(of_model)
    assert {k: set(v) for k, v in ours["state"].items()} == {
        k: set(v) for k, v in of_optimizer["state"].items()
    }
    assert [group["params"] for group in ours["param_groups"]] == [
        group["params"] for group in of_optimizer["param_groups"]
    ]
    for name, values in of_optimizer["state"].items():
        for key, value in values.items():
            assert torch.equal(_local(ours["state"][name][key]), _local(value))


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def test_the_pattern_follows_from_the_parameters() -> None:
    model = sharded()
    optimizer, ema = stepped(model), sharded()
    found = {
        each.key: each.sharing_pattern
        for each in state_components(model=model, optimizer=optimizer, ema=ema, num_ranks=2)
    }
    assert found == {
        "model": SharingPattern.SHARDED,
        "optimizer": SharingPattern.SHARDED,
        "ema": SharingPattern.SHARDED,
        "model/attributes": SharingPattern.PER_RANK,
        "model/rank_buffers": SharingPattern.PER_RANK,
        "ema/rank_buffers": SharingPattern.PER_RANK,
    }
    plain = Model()
    assert {
        each.sharing_pattern
        for each in state_components(model=plain, optimizer=stepped(plain), ema=Model())
        if each.key != "model/attributes"
    } == {SharingPattern.REPLICATED}


def test_an_optimizer_without_a_state_gets_moments_like_its_parameters() -> None:
    model = sharded()
    saved = OptimizerState(stepped(model), {"model": model}).state_dict()
    fresh = torch.optim.AdamW(model.parameters(), lr=0.5)
    capture = OptimizerState(fresh, {"model": model})
    before = dict(fresh.state)
    pairs = list(pairs_of(capture, on_meta(saved)))
    assert len(pairs) == 2 * len(saved["state"])
    assert dict(fresh.state) == before
    capture.check_state_dict(saved)
    capture.load_state_dict(saved)
    parameters = dict(model.named_parameters())
    for name, values in saved["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            moment = fresh.state[parameters[name]][key]
            assert moment.placements == parameters[name].placements
            assert torch.equal(moment.to_local(), values[key].to_local())
        assert type(fresh.state[parameters[name]]["step"]) is torch.Tensor
    assert parameters["unused.weight"] not in fresh.state
    assert fresh.param_groups[0]["lr"] == 0.01


def test_moments_that_are_there_are_filled_in_place() -> None:
    model = sharded()
    optimizer = stepped(model, lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9))
    capture = OptimizerState(optimizer, {"model": model})
    parameter = model.body[0].weight
    live = optimizer.state[parameter]["momentum_buffer"]
    memory = live.to_local().data_ptr()
    whole = {k: v.full_tensor() + 1 for k, v in _moments(capture).items()}
    state = capture.state_dict()
    for name, value in whole.items():
        state["state"][name] = {"momentum_buffer": value}
    capture.load_state_dict(state)
    assert optimizer.state[parameter]["momentum_buffer"] is live
    assert live.to_local().data_ptr() == memory
    assert torch.equal(live.to_local(), whole["body.0.weight"])


def _moments(capture: OptimizerState) -> dict[str, Any]:
    return {k: v["momentum_buffer"] for k, v in capture.state_dict()["state"].items()}


def test_a_whole_state_is_cut_to_the_parts_of_a_sharded_model() -> None:
    model = sharded()
    whole = {name: value.clone() for name, value in Model().state_dict().items()}
    whole["tied.weight"] = whole["body.1.weight"]
    capture = ModelState(model)
    capture.check_state_dict(whole)
    capture.load_state_dict(whole)
    for name, value in capture.state_dict().items():
        assert torch.equal(_local(value), whole[name])


def test_a_checkpoint_that_does_not_fit_is_refused_by_its_shapes_alone() -> None:
    model = sharded()
    capture = ModelState(model)
    saved = on_meta(capture.state_dict())
    saved["body.0.bias"] = torch.empty(7, device="meta")
    saved["norm.bias"] = torch.empty(6, dtype=torch.float64, device="meta")
    with pytest.raises(StateMismatchError, match=r"body\.0\.bias.*\(7,\).*and 1 more"):
        capture.check_state_dict(saved)


def test_a_scalar_parameter_is_distinguished_from_a_count_of_steps() -> None:
    mesh = init_device_mesh("cpu", (1,))
    scale = nn.Parameter(distribute_tensor(torch.tensor(2.0), mesh, [Replicate()]))
    model = nn.Module()
    model.scale = scale
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    scale.grad = distribute_tensor(torch.tensor(1.0), mesh, [Replicate()])
    optimizer.step()
    saved = OptimizerState(optimizer, {"model": model}).state_dict()
    fresh = torch.optim.Adam(model.parameters())
    OptimizerState(fresh, {"model": model}).load_state_dict(saved)
    kinds = {name: type(value) for name, value in fresh.state[scale].items()}
    assert kinds == {"step": torch.Tensor, "exp_avg": DTensor, "exp_avg_sq": DTensor}


def test_a_sharded_buffer_belongs_to_the_model_and_not_to_the_rank() -> None:
    module = nn.Module()
    mesh = init_device_mesh("cpu", (1,))
    module.register_buffer("table", distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
    assert rank_buffer_components(model=module) == ()
    module.register_buffer("seen", torch.zeros(()))
    (buffers,) = rank_buffer_components(model=module)
    assert list(buffers.stateful.state_dict()) == ["seen"]
    assert ModelState(module).first_rank_only() == {"seen"}


def test_gradients_of_sharded_parameters_are_refused() -> None:
    component = StateComponent("model", ModelState(sharded()), SharingPattern.SHARDED)
    with pytest.raises(ConfigurationError, match="parameters of model are sharded"):
        require_gradients([component])


class Custom:
    """A user object: DTensors in a list in a dict."""

    def __init__(self, value: float) -> None:
        mesh = init_device_mesh("cpu", (1,))
        self.parts = [distribute_tensor(torch.full((4,), value), mesh, [Shard(0)])]

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts, "n": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for live, saved in zip(self.parts, state["parts"], strict=True):
            live.copy_(saved)


def test_a_user_component_may_hold_dtensors(tmp_path: Path) -> None:
    def component(live: Custom) -> StateComponent:
        return StateComponent("callbacks/custom", live, SharingPattern.SHARDED)

    with Checkpointer(tmp_path, components=[component(Custom(1.0))]) as first:
        first.resume()
        first.save()
    assert list(tmp_path.glob("step-*/callbacks/custom/index.json"))
    live = Custom(2.0)
    with Checkpointer(tmp_path, components=[component(live)]) as second:
        assert second.resume().resumed
    assert torch.equal(live.parts[0].to_local(), torch.ones(4))


def test_a_save_before_the_first_step_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    components = state_components(model=model, optimizer=optimizer)
    with Checkpointer(tmp_path, components=components) as checkpointer:
        checkpointer.resume()
        checkpointer.save()
    assert not optimizer.state
    with Checkpointer(tmp_path, components=components) as checkpointer:
        assert checkpointer.resume().resumed
    assert not optimizer.state


def test_moments_that_appear_between_two_saves_are_in_the_second(tmp_path: Path) -> None:
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    components = state_components(model=model, optimizer=optimizer)
    with Checkpointer(tmp_path, components=components) as checkpointer:
        checkpointer.resume()
        checkpointer.save()
        for _ in range(2):  # the second time with the plan of the first
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.save()
    other = sharded()
    fresh = torch.optim.AdamW(other.parameters(), foreach=False)
    with Checkpointer(
        tmp_path, components=state_components(model=other, optimizer=fresh)
    ) as checkpointer:
        assert checkpointer.resume().resumed
    for name, parameter in model.named_parameters():
        twin = other.get_parameter(name)
        assert torch.equal(twin.to_local(), parameter.to_local())
        assert (parameter in optimizer.state) == (twin in fresh.state)
        for key, value in optimizer.state.get(parameter, {}).items():
            assert torch.equal(_local(fresh.state[twin][key]), _local(value))
            assert key != "step" or value == 2
