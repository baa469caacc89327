"""Models and optimizers under FSDP1, as one rank of several sees them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.testing._internal.distributed.fake_pg import FakeStore

from resumekit.capture.fsdp1 import FlatModelState, FlatOptimizerState, flat_parts
from resumekit.capture.gradients import require_gradients
from resumekit.capture.model import ModelState, frozen_of
from resumekit.capture.optimizer import OptimizerState, pairs_of
from resumekit.capture.slots import rank_buffer_components, state_components
from resumekit.errors import (
    ConfigurationError,
    DeclarationError,
    StateMismatchError,
    UnsupportedValueError,
)
from resumekit.serialization.decoding import decode
from resumekit.serialization.planning import encode_local
from resumekit.serialization.sharding import FlatPart
from resumekit.state import SharingPattern

RANKS = 3


@pytest.fixture(autouse=True, params=[1])
def _one_rank_of_three(request: pytest.FixtureRequest) -> Iterator[None]:
    # Collectives of this group do nothing: a gather inside a capture would give the wrong values.
    store = FakeStore()
    torch.distributed.init_process_group("fake", rank=request.param, world_size=RANKS, store=store)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP's, of what has come after it
        yield
    torch.distributed.destroy_process_group()


class Model(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        first, second = nn.Linear(4, 6), nn.Linear(6, 6, bias=False)
        self.body = nn.Sequential(first, second)
        self.again = nn.Linear(6, 6, bias=False)
        if tied:
            self.again.weight = second.weight
        self.norm = nn.BatchNorm1d(6)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.again(self.body(x)))
        return out

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def flattened(model: nn.Module, **options: Any) -> Any:
    options = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    return FullyShardedDataParallel(model, **options)


def stepped(model: Any, kind: Any = torch.optim.AdamW) -> Any:
    """An optimizer that has stepped on every parameter of which this rank has elements."""
    optimizer = kind(model.parameters(), lr=0.01)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.numel() else None
    optimizer.step()
    return optimizer


def whole_state(model: nn.Module) -> dict[str, Any]:
    return {n: v.clone() if hasattr(v, "clone") else v for n, v in model.state_dict().items()}


def test_a_model_is_its_shards_under_the_names_of_the_bare_one() -> None:
    torch.manual_seed(0)
    bare = Model()
    expected = whole_state(bare)
    state = FlatModelState(flattened(bare)).state_dict()
    assert set(state) == set(expected)
    parts = {name: value for name, value in state.items() if isinstance(value, FlatPart)}
    assert set(parts) == {name for name, _ in Model().named_parameters()}
    for name, part in parts.items():
        assert part.shape == expected[name].shape
        assert torch.equal(part.local, part.cut(expected[name]))
    assert 0 < sum(part.local.numel() for part in parts.values()) < 90
    assert torch.equal(state["norm.running_var"], expected["norm.running_var"])
    assert state["_extra_state"] == {"seen": 0}


@pytest.mark.parametrize("width", [1000, 1100])
def test_frozen_parameters_are_as_large_as_those_of_all_ranks(width: int) -> None:
    # A third of 4.8 MB is below the 4 MiB from which frozen parameters have files of their own.
    bare = nn.Sequential(nn.Linear(width, width).requires_grad_(False), nn.Linear(width, 2))
    expected = frozenset({"0.weight", "0.bias"} if width == 1100 else ())
    assert frozen_of(ModelState(bare)) == expected
    bare[0], bare[1] = flattened(bare[0]), flattened(bare[1])
    assert frozen_of(FlatModelState(bare)) == expected


def test_a_whole_state_is_loaded_into_the_shard_that_the_optimizer_steps_on() -> None:
    torch.manual_seed(0)
    model = flattened(Model())
    torch.manual_seed(1)
    other: Any = Model()
    other.seen = 7
    other.norm.running_mean += 1
    saved = whole_state(other)
    capture = FlatModelState(model)
    memory = {name: part.local.data_ptr() for name, part in flat_parts("", model).items()}
    capture.check_state_dict(saved)
    capture.load_state_dict(saved)
    for name, part in flat_parts("", model).items():
        assert part.local.data_ptr() == memory[name]
        assert torch.equal(part.local, part.cut(saved[name]))
    bare = model.module
    assert (bare.seen, float(bare.norm.running_mean[0])) == (7, 1.0)
    for name, parameter in bare.named_parameters():
        assert parameter.numel() in (0, flat_parts("", model)[name].local.numel())


def test_wrappers_inside_and_outside_change_no_name() -> None:
    torch.manual_seed(0)
    bare = Model()
    expected = whole_state(bare)
    bare.body[0] = flattened(bare.body[0])
    bare.body[1] = checkpoint_wrapper(bare.body[1])
    model: Any = torch.compile(flattened(bare))
    state = FlatModelState(model).state_dict()
    assert set(state) == set(expected)
    for name, part in flat_parts("", model).items():
        assert torch.equal(part.local, part.cut(expected[name]))
    capture = FlatOptimizerState(stepped(model), {"model": model})
    assert set(capture.outline()) <= set(expected)


def test_the_pattern_and_the_buffers_of_each_rank() -> None:
    model = flattened(Model())
    found = {
        each.key: each.sharing_pattern
        for each in state_components(model=model, optimizer=stepped(model), num_ranks=RANKS)
    }
    assert found == {
        "model": SharingPattern.SHARDED,
        "optimizer": SharingPattern.SHARDED,
        "model/attributes": SharingPattern.PER_RANK,
        "model/rank_buffers": SharingPattern.PER_RANK,
    }
    (buffers,) = rank_buffer_components(model=model)
    assert set(buffers.stateful.state_dict()) == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    size = FlatModelState(model).fingerprint()
    assert size["num_parameters"] == sum(p.numel() for p in Model().parameters())


def test_moments_that_only_other_ranks_have_are_added_empty_once() -> None:
    model = flattened(Model())
    capture = FlatOptimizerState(stepped(model), {"model": model})
    local = capture.state_dict()
    names = [name for name, _ in Model().named_parameters()]
    missing = [name for name in names if name not in local["state"]]
    assert missing
    outline = capture.outline()
    some = next(iter(outline.values()))
    capture.join([dict.fromkeys(names, some), outline])
    joined = capture.state_dict()
    assert list(joined["state"]) == names
    for name in missing:
        assert joined["state"][name]["exp_avg"].local.numel() == 0
        assert joined["state"][name]["exp_avg"].shape == Model().get_parameter(name).shape
        assert joined["state"][name]["step"] == 1
    assert set(capture.state_dict()["state"]) == set(local["state"])
    assert local["parameters"] == {
        name: f"float32 {tuple(p.shape)}" for name, p in Model().named_parameters()
    }


def test_an_optimizer_takes_its_shards_of_a_whole_state() -> None:
    bare = Model()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=0.5)
    for parameter in bare.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    saved = OptimizerState(optimizer, {"model": bare}).state_dict()
    model = flattened(Model())
    fresh = torch.optim.AdamW(model.parameters(), lr=0.1)
    capture = FlatOptimizerState(fresh, {"model": model})
    capture.check_state_dict(saved)
    assert len(list(pairs_of(capture, saved))) == 2 * len(saved["state"])
    capture.load_state_dict(saved)
    assert fresh.param_groups[0]["lr"] == 0.5
    parts = flat_parts("", model)
    saved_state = capture.state_dict()["state"]
    assert set(saved_state) == {name for name, part in parts.items() if part.local.numel()}
    for name, values in saved_state.items():
        expected = parts[name].cut(saved["state"][name]["exp_avg"])
        assert torch.equal(values["exp_avg"].local, expected)
        assert values["exp_avg"].local.untyped_storage().nbytes() == expected.nbytes


def test_tied_names_are_one_shard_and_two_values_for_them_are_refused() -> None:
    model = flattened(Model(tied=True))
    capture = FlatModelState(model)
    state = capture.state_dict()
    assert state["again.weight"] is state["body.1.weight"]
    whole = whole_state(Model(tied=True))
    capture.check_state_dict(whole)
    whole["again.weight"] = whole["again.weight"] + 1
    with pytest.raises(StateMismatchError, match=r"again\.weight.*tied to 'body.1.weight'"):
        capture.check_state_dict(whole)


@pytest.mark.parametrize("sharded", [True, False], ids=["flat", "whole"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_values_tied_in_the_checkpoint_but_not_here_are_refused(device: str, sharded: bool) -> None:
    tied = Model(tied=True)
    state = FlatModelState(flattened(tied)).state_dict() if sharded else tied.state_dict()
    local = encode_local("model", state)
    tensors = {n: torch.zeros(t.shape, device=device) for n, t in local.tensors.items()}
    tensors["norm.num_batches_tracked"] = tensors["norm.num_batches_tracked"].long()
    saved = decode(local.tree, tensors)  # on the meta device, as before it is read
    FlatModelState(flattened(Model(tied=True))).check_state_dict(saved)
    expected = r"again\.weight: tied to 'body.1.weight' in the checkpoint, expected no tie"
    with pytest.raises(StateMismatchError, match=expected):
        FlatModelState(flattened(Model())).check_state_dict(saved)


def test_what_does_not_fit_is_refused_by_whole_shapes() -> None:
    capture = FlatModelState(flattened(Model()))
    saved = {n: v.to("meta") if hasattr(v, "to") else v for n, v in whole_state(Model()).items()}
    capture.check_state_dict(saved)
    saved["body.0.bias"] = torch.empty(7, device="meta")
    saved["norm.bias"] = saved["norm.bias"].double()
    with pytest.raises(StateMismatchError, match=r"body\.0\.bias.*\(7,\).*and 1 more"):
        capture.check_state_dict(saved)


def test_settings_that_cannot_be_stored_exactly_are_refused() -> None:
    model = nn.Sequential(flattened(nn.Linear(4, 4), use_orig_params=False))
    with pytest.raises(DeclarationError, match=r"model: 0: .*use_orig_params=False"):
        state_components(model=model)
    with pytest.raises(DeclarationError, match="ema: wrapped in FullyShardedDataParallel"):
        state_components(model=nn.Linear(2, 2), ema=flattened(nn.Linear(2, 2)))
    wrapped = flattened(Model())
    optimizer = stepped(wrapped)
    parameter = next(iter(optimizer.state))
    for value in (torch.zeros(2, 2), [torch.zeros(3)]):
        optimizer.state[parameter]["row"] = value
        with pytest.raises(UnsupportedValueError, match=r"optimizer: .*row.*shard"):
            FlatOptimizerState(optimizer, {"model": wrapped}).state_dict()
    (component, *_) = state_components(model=wrapped)
    with pytest.raises(ConfigurationError, match="mid_accumulation"):
        require_gradients([component])


def test_what_a_forward_pass_left_gathered_is_not_taken_for_what_is_loaded() -> None:
    model = flattened(Model())
    capture = FlatModelState(model)
    with torch.no_grad():
        model(torch.randn(4, 4))  # the outermost module stays gathered until a backward pass
    assert not model._handle.needs_unshard()
    saved = whole_state(Model())
    capture.load_state_dict(saved)
    assert model._handle.needs_unshard()
    for name, part in flat_parts("", model).items():
        assert torch.equal(part.local, part.cut(saved[name]))


def test_what_is_not_sharded_stands_whole_in_the_state() -> None:
    model = flattened(Model(), sharding_strategy=ShardingStrategy.NO_SHARD)
    state = FlatModelState(model).state_dict()
    assert not any(isinstance(value, FlatPart) for value in state.values())
    assert state["body.0.weight"].shape == (6, 4)
    capture = FlatOptimizerState(stepped(model), {"model": model})
    assert capture.state_dict()["state"]["body.0.weight"]["exp_avg"].shape == (6, 4)
