"""Models are restored in place, whatever wraps them, or are refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DataParallel

from resumekit.capture.model import ModelState
from resumekit.capture.named_tensors import RankBuffers
from resumekit.errors import StateMismatchError


class Net(nn.Module):
    def __init__(self, *, hidden: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, hidden, dtype=dtype)
        self.norm = nn.BatchNorm1d(hidden, dtype=dtype)
        self.head = nn.Linear(hidden, 5, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Counting(nn.Module):
    """A module with extra state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seen: dict[str, Any] = {}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for value in module.state_dict().values():
            if value.is_floating_point():
                value.uniform_()
            else:
                value.fill_(7)
    return module


def refused(live: nn.Module, saved: Any) -> str:
    with pytest.raises(StateMismatchError) as caught:
        ModelState(live).check_state_dict(saved)
    assert caught.value.remedy
    return str(caught.value)


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "DataParallel": DataParallel,
    "compiled": compiled,
    "checkpointed": checkpoint_wrapper,
}


@pytest.mark.parametrize("then", WRAPPERS)
@pytest.mark.parametrize("now", WRAPPERS)
def test_any_wrapper_at_save_and_any_at_load(
    then: str, now: str, stored: Any, assert_same: Any
) -> None:
    saved = stored(ModelState(randomised(WRAPPERS[then](Net()))).state_dict())
    assert list(saved) == list(Net().state_dict())
    live = ModelState(WRAPPERS[now](Net()))
    live.check_state_dict(saved)
    assert live.load_state_dict(saved) == ()
    assert_same(live.state_dict(), saved)


def test_the_state_holds_the_live_tensors_and_loading_keeps_them(stored: Any) -> None:
    model = Net()
    live = ModelState(model)
    assert live.state_dict()["head.weight"].data_ptr() == model.head.weight.data_ptr()
    parameters, saved = dict(model.named_parameters()), stored(ModelState(randomised(Net())))
    live.load_state_dict(saved)
    assert all(model.get_parameter(name) is p for name, p in parameters.items())
    assert model.head.weight is model.embedding.weight
    saved["head.weight"].add_(1)
    assert not torch.equal(model.head.weight, saved["head.weight"])


@pytest.fixture
def stored(stored: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda state: stored(state.state_dict() if isinstance(state, ModelState) else state)


def test_extra_state_is_restored_and_is_not_shared(stored: Any) -> None:
    counting = Counting()
    running, live = nn.Sequential(counting), nn.Sequential(Counting())
    counting.seen["batches"] = [1, 2]
    saved = stored(ModelState(running))
    ModelState(live).check_state_dict(saved)
    ModelState(live).load_state_dict(saved)
    assert live[0].seen == {"batches": [1, 2]}
    saved["0._extra_state"]["batches"].append(3)
    assert live[0].seen == {"batches": [1, 2]}


def test_a_module_that_leaves_names_out_of_its_state_is_loaded_without_them(stored: Any) -> None:
    class HeadOnly(Net):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            whole = super().state_dict(*args, **kwargs)
            return {name: value for name, value in whole.items() if name.startswith("norm")}

    saved = stored(ModelState(randomised(HeadOnly())))
    live = HeadOnly()
    embedding = live.embedding.weight.detach().clone()
    ModelState(live).check_state_dict(saved)
    ModelState(live).load_state_dict(saved)
    assert torch.equal(live.norm.weight, saved["norm.weight"])
    assert torch.equal(live.embedding.weight, embedding)


def test_a_renamed_parameter_is_refused_with_both_names(stored: Any) -> None:
    saved = stored(ModelState(Net()))
    saved = {name.replace("norm.", "batch_norm."): value for name, value in saved.items()}
    message = refused(Net(), saved)
    assert "model: norm.weight" in message
    assert "'batch_norm.weight'" in message
    assert "4 more" in message


def test_a_model_of_which_every_name_changed_is_refused_quickly() -> None:
    layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(1500))
    saved = {f"blocks.{name}": value for name, value in layers.state_dict().items()}
    begin = time.process_time()
    message = refused(layers, saved)
    assert time.process_time() - begin < 60
    assert "'blocks.0.weight'" in message


def test_a_parameter_of_another_kind_is_not_taken_for_a_renamed_one(stored: Any) -> None:
    saved = stored(ModelState(Net()))
    saved["norm.weights"] = saved.pop("norm.weight")[:2]
    message = refused(Net(), saved)
    assert "norm.weight: this parameter is not in the checkpoint" in message
    assert "norm.weights" in message


def test_an_unexpected_parameter_is_refused(stored: Any) -> None:
    saved = stored(ModelState(Net()))
    saved["adapter.weight"] = torch.ones(9)
    assert "adapter.weight: the checkpoint has this parameter" in refused(Net(), saved)


class Quantized(nn.Linear):
    """Saves the scale of its weights and never loads one, as Linear4bit of bitsandbytes."""

    scale = 2.0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = torch.tensor(self.scale)


def test_what_a_module_saves_and_does_not_load_has_to_be_the_same(stored: Any) -> None:
    saved = stored(ModelState(Quantized(2, 2)))
    again = Quantized(2, 2)
    ModelState(again).load_state_dict(saved)
    assert torch.equal(again.weight, saved["weight"])
    again.scale = 3.0
    with pytest.raises(StateMismatchError, match=r"weight\.scale: in the checkpoint"):
        ModelState(again).load_state_dict(saved)


def test_another_shape_and_another_dtype_are_refused_with_both(stored: Any) -> None:
    saved = stored(ModelState(Net()))
    message = refused(Net(hidden=4), saved)
    assert "float32 (5, 3) in the checkpoint, expected float32 (5, 4)" in message
    message = refused(Net(dtype=torch.bfloat16), saved)
    assert "float32 (5, 3) in the checkpoint, expected bfloat16 (5, 3)" in message


def test_a_live_tensor_without_memory_is_refused(stored: Any) -> None:
    saved = stored(ModelState(nn.Linear(2, 2)))
    assert "to_empty" in refused(nn.Linear(2, 2, device="meta"), saved)


def test_values_tied_here_but_not_in_the_checkpoint_are_refused(stored: Any) -> None:
    untied = Net()
    untied.head.weight = nn.Parameter(untied.head.weight.detach() + 1)
    message = refused(Net(), stored(ModelState(untied)))
    assert "head.weight" in message
    assert "tied to 'embedding.weight'" in message


def test_equal_values_that_only_the_checkpoint_does_not_tie_are_loaded(stored: Any) -> None:
    saved = stored(ModelState(Net()))
    saved["head.weight"] = saved["head.weight"].clone()
    ModelState(Net()).check_state_dict(saved)


def test_values_tied_in_the_checkpoint_but_not_here_are_refused(stored: Any) -> None:
    untied = Net()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    message = refused(untied, stored(ModelState(Net())))
    assert "tied to 'embedding.weight' in the checkpoint" in message


def test_a_lazy_module_takes_its_shape_from_the_checkpoint(stored: Any, assert_same: Any) -> None:
    saved = stored(ModelState(nn.Linear(3, 2)))
    lazy = nn.LazyLinear(2)
    ModelState(lazy).check_state_dict(saved)
    ModelState(lazy).load_state_dict(saved)
    assert_same(stored(ModelState(lazy)), saved)


def test_a_tensor_where_the_checkpoint_has_a_value_is_refused(stored: Any) -> None:
    saved = stored(ModelState(Net()))
    saved["norm.weight"] = 3
    assert "norm.weight" in refused(Net(), saved)


@pytest.mark.parametrize("state", [None, [], 3])
def test_what_is_no_model_state_is_refused(state: Any) -> None:
    with pytest.raises(StateMismatchError, match="model"):
        ModelState(Net()).check_state_dict(state)


def test_a_rank_gets_the_buffers_that_it_had(stored: Any) -> None:
    running, live = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    running(torch.arange(8.0).reshape(4, 2))
    saved = stored(RankBuffers(ModelState(running), key="model/rank_buffers").state_dict())
    buffers, mean = RankBuffers(ModelState(live), key="model/rank_buffers"), live.running_mean
    buffers.check_state_dict(saved)
    buffers.load_state_dict(saved)
    assert live.running_mean is mean
    for name, buffer in running.named_buffers():
        assert torch.equal(live.get_buffer(name), buffer), name


def test_the_fingerprint_counts_parameters_once() -> None:
    model = Net()
    model.norm.bias.requires_grad_(False)
    found = ModelState(model).fingerprint()
    assert found == {"num_parameters": 15 + 6, "num_trainable_parameters": 15 + 3}
