"""What training changes in a module outside its state_dict is restored with the RNG state."""

from __future__ import annotations

import functools
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from resumekit.capture.slots import attribute_components
from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.user_state import UserState
from resumekit.errors import InvalidStateError
from resumekit.state import Fidelity, WorldChange


class Handle:
    """An object of the user's, without attributes yet."""


def state_of(model: nn.Module) -> UserState:
    return UserState({"model": Holder(model, is_component=True)}, key="attributes")


def paths(state: Any) -> set[str]:
    """The owners and names of the slots in a state."""
    return {f"{owner}.{name or role}" for owner, role, name, _ in state["slots"]}


class Annealed(nn.Module):
    """A layer that counts, anneals, remembers, and keeps a buffer to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(2)
        self.calls = 0
        self.recent: list[Tensor] = []
        self.seen = deque([1.0], maxlen=3)
        self.mean = torch.zeros(2)  # no buffer
        self.handle = Handle()
        self.total: Tensor
        self.register_buffer("total", torch.zeros(2), persistent=False)
        self.register_buffer("mask", torch.ones(2), persistent=False)

    def train_on(self, value: float) -> None:
        """As a forward pass would, and user code around it."""
        self.calls += 1
        self.recent.append(self.linear(torch.full((2,), value)).sum())
        self.seen.append(value)
        self.mean = 0.5 * self.mean + value
        self.total += value
        self.dropout.p = 0.5 / (1 + self.calls)
        self.norm.momentum = 0.01
        self.linear.bias.requires_grad_(False)
        self.norm.eval()


def resumed(saved: nn.Module, state: Any, live: nn.Module) -> UserState:
    found = state_of(live)
    live.load_state_dict(saved.state_dict())
    found.check_state_dict(state)
    assert found.load_state_dict(state) == ()
    return found


def test_all_that_changed_is_restored_with_the_rng_state(stored: Any) -> None:
    model = Annealed()
    attributes = state_of(model)
    model.train_on(2.0)
    model.train_on(3.0)
    state = stored(attributes.state_dict())

    live = Annealed()
    found = resumed(model, state, live)
    assert live.calls == 0  # not yet
    assert live.norm.training
    assert found.state_dict() == state
    found.restore_now()
    assert (live.calls, live.dropout.p, live.norm.momentum) == (2, 0.5 / 3, 0.01)
    assert live.seen == model.seen
    assert live.seen.maxlen == 3
    assert [each.item() for each in live.recent] == [each.item() for each in model.recent]
    for name in ("mean", "total", "mask"):
        assert torch.equal(getattr(live, name), getattr(model, name))
    assert not live.linear.bias.requires_grad
    assert live.linear.weight.requires_grad
    assert live.training
    assert not live.norm.training
    live.train_on(4.0)
    model.train_on(4.0)
    assert torch.equal(live.total, model.total)
    assert torch.equal(live.mean, model.mean)


def test_what_is_as_the_script_made_it_is_not_saved() -> None:
    attributes = state_of(Annealed())
    assert not paths(attributes.state_dict())
    assert attributes.findings() == ()


def test_buffers_that_no_state_dict_holds_are_saved_by_the_component_of_a_model() -> None:
    model: Any = Annealed()
    (component,) = attribute_components(model, others=[torch.optim.SGD(model.parameters())])
    model.total += 1
    assert "model.total" in paths(component.stateful.state_dict())


def test_what_went_back_to_its_start_goes_back_though_the_launch_has_changed_it() -> None:
    state = state_of(Annealed()).state_dict()
    live = Annealed()
    found = state_of(live)
    found.load_state_dict(state)
    live.calls, live.dropout.p = 5, 0.9
    live.linear.weight.requires_grad_(False)
    live.eval()
    found.restore_now()
    assert (live.calls, live.dropout.p, live.training) == (0, 0.5, True)
    assert live.linear.weight.requires_grad
    live.calls = 7
    found.restore_now()
    assert live.calls == 7  # once


def test_another_wrapper_does_not_change_a_name(stored: Any) -> None:
    model: Any = nn.Sequential(Annealed())
    wrapped = nn.DataParallel(model)
    attributes = state_of(wrapped)
    model[0].train_on(1.0)
    state = stored(attributes.state_dict())
    assert {"model.0.calls", "model.0.dropout.p", "model.0.norm.momentum", "model.0.total"} < paths(
        state
    )
    live: Any = nn.Sequential(Annealed())
    resumed(model, state, live).restore_now()
    assert live[0].calls == 1


def test_values_next_to_something_that_cannot_be_saved_are_lost_and_reported() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.is_ready = False
            self.source: Any = None

    model: Any = nn.Sequential(Cached(), nn.Dropout(0.5))
    attributes = state_of(model)
    model[0].source, model[0].is_ready, model[1].p = iter([1]), True, 0.1
    unknown, lost = attributes.findings()
    assert (unknown.key, unknown.fidelity) == ("model.0.source", Fidelity.UNKNOWN)
    assert (lost.key, lost.fidelity) == ("model.0.is_ready", Fidelity.LOST)
    assert lost.reason.startswith("changed together with model.0.source")
    assert 'transient={"model.0.is_ready"}' in lost.reason
    state = attributes.state_dict()
    assert state["lost"] == ["model.0.is_ready"]
    live: Any = nn.Sequential(Cached(), nn.Dropout(0.5))
    found = state_of(live)
    found.load_state_dict(state)
    live[0].is_ready = True  # by the script itself
    found.restore_now()
    assert live[0].is_ready
    assert live[1].p == 0.1


def test_an_object_that_training_made_is_made_again(stored: Any) -> None:
    model: Any = Annealed()
    attributes = state_of(model)
    model.helper = Handle()
    model.helper.step = 3
    model.also = model.helper
    live: Any = Annealed()
    resumed(model, stored(attributes.state_dict()), live).restore_now()
    assert live.helper.step == 3
    assert type(live.helper) is Handle
    assert live.also is live.helper


@pytest.mark.parametrize("size", [2, 1 << 18])
def test_what_a_layer_has_computed_is_no_reason_to_worry(size: int) -> None:
    model: Any = nn.Linear(1, 1)
    model.calls = 0
    attributes = state_of(model)
    model.features = model(torch.ones(size, 1))
    model.calls = 1
    assert attributes.findings() == ()
    assert "model.calls" in paths(attributes.state_dict())


def test_what_the_script_begins_otherwise_stays_the_scripts_and_is_reported(
    stored: Any,
) -> None:
    model = Annealed()
    attributes = state_of(model)
    model.train_on(1.0)
    state = stored(attributes.state_dict())
    live = Annealed()
    live.dropout.p = 0.9
    found = state_of(live)
    (message,) = found.load_state_dict(state)
    assert (
        message == "initial value changed in the script: model.dropout.p; using the script's value"
    )
    found.restore_now()
    assert (live.dropout.p, live.calls) == (0.9, 1)


def test_a_tensor_that_is_another_attribute_too_is_replaced(stored: Any) -> None:
    def aliased() -> Any:
        model: Any = nn.Linear(1, 1)
        model.default = torch.zeros(1)
        model.total = model.default
        return model

    model = aliased()
    attributes = state_of(model)
    model.total = torch.ones(1)
    live = aliased()
    resumed(model, stored(attributes.state_dict()), live).restore_now()
    assert (live.total.item(), live.default.item()) == (1.0, 0.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_what_lay_on_a_device_goes_back_there(stored: Any) -> None:
    model: Any = Annealed().cuda()
    attributes = state_of(model)
    model.recent, model.mean = [torch.ones(1, device="cuda")], torch.ones(2, device="cuda")
    model.on_host = [torch.ones(1)]
    live: Any = Annealed().cuda()
    resumed(model, stored(attributes.state_dict()), live).restore_now()
    assert live.recent[0].is_cuda
    assert live.mean.is_cuda
    assert not live.on_host[0].is_cuda


def test_what_the_extra_state_of_a_module_lacks_is_saved() -> None:
    class Extra(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.sum, self.words = 0, 0, iter("abc")

        def get_extra_state(self) -> int:
            return self.calls

        def set_extra_state(self, state: int) -> None:
            self.calls = state

    model = Extra()
    attributes = state_of(model)
    model.calls, model.sum, model.words = 3, 5, iter("abc")
    assert paths(attributes.state_dict()) == {"model.calls", "model.sum"}
    assert not attributes.findings()  # what nothing can read, its state is for


def test_a_container_that_holds_itself_is_restored(stored: Any) -> None:
    def cyclic() -> Any:
        model: Any = nn.Linear(1, 1)
        model.graph = {}
        model.graph["self"] = model.graph
        return model

    model, live = cyclic(), cyclic()
    attributes = state_of(model)
    model.graph["other"] = 1
    graph = live.graph
    resumed(model, stored(attributes.state_dict()), live).restore_now()
    assert live.graph is graph is graph["self"]
    assert graph["other"] == 1


def test_a_module_that_is_gone_is_left_out() -> None:
    model: Any = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    attributes = state_of(model)
    model[1].p = 0.1
    found = state_of(nn.Sequential(nn.Dropout(0.5)))
    (message,) = found.load_state_dict(attributes.state_dict())
    assert message == "not in this program, not restored: model.1.p"
    found.restore_now()


def test_another_number_of_ranks_takes_over_those_of_one() -> None:
    model = nn.Dropout(0.5)
    attributes = state_of(model)
    change = WorldChange(1, 2, 1)
    assert attributes.resplit_state_dict({0: {"slots": []}}, change) == ({"slots": []}, ())


def test_a_state_of_something_else_is_refused() -> None:
    with pytest.raises(InvalidStateError):
        state_of(nn.Linear(1, 1)).check_content("model/attributes", {"names": 3})


def test_a_parameter_that_training_adds_to_a_module_of_an_object_is_restored(stored: Any) -> None:
    live, again = (SimpleNamespace(kept=nn.ParameterDict({"a": torch.zeros(2)})) for _ in range(2))
    saved, state = (UserState({"here": each}, key="callbacks/attributes") for each in (live, again))
    live.kept["b"] = torch.ones(2)
    state.load_state_dict(stored(saved.state_dict()))
    state.restore_now()
    assert {name: each.tolist() for name, each in again.kept.items()} == {"a": [0, 0], "b": [1, 1]}
    assert again.kept["b"].requires_grad


def test_the_method_of_the_class_in_an_attribute_is_no_change() -> None:
    """As frameworks leave it that wrap ``forward`` while a step runs; a wrapper is a change."""
    model: Any = nn.Linear(2, 2)
    state = state_of(model)
    forward = model.forward
    model.forward = forward
    assert state.findings() == ()
    model.forward = functools.partial(forward)
    assert [each.key for each in state.findings()] == ["model.forward"]


class _Tuner(nn.Module):
    """Finds what it does not have in its first model, as the tuners of PEFT do."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.other = nn.Linear(2, 2), nn.Linear(2, 2)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)


def test_the_method_that_a_module_finds_in_a_submodule_is_no_change_as_its_attribute() -> None:
    """PEFT 0.21 peft_model.py generate() leaves it there; that of another module is a change."""
    tuner: Any = _Tuner()
    state = state_of(tuner)
    tuner.reset_parameters = tuner.model.reset_parameters
    assert state.findings() == ()
    tuner.reset_parameters = tuner.other.reset_parameters
    assert [each.key for each in state.findings()] == ["model.reset_parameters"]
    plain: Any = nn.Sequential(nn.Linear(2, 2))
    state = state_of(plain)
    plain.reset_parameters = plain[0].reset_parameters
    assert [each.key for each in state.findings()] == ["model.reset_parameters"]


def test_hooks_that_only_the_first_launch_has_at_its_first_batch_are_no_state() -> None:
    model = nn.Linear(2, 2)
    state = state_of(model)
    # As FSDP2 at the first forward pass: in validation before the training, or in the training.
    model.register_state_dict_pre_hook(lambda *_: None)
    model.register_load_state_dict_pre_hook(lambda *_: None)
    state.restore_now()
    assert paths(state.state_dict()) == set()
