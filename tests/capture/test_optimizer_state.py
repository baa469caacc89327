"""Optimizer state: names, identities, dtypes, hooks, and everything that is refused."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from resumekit.capture.optimizer import OptimizerState
from resumekit.errors import ConfigurationError, InvalidStateError, StateMismatchError


class TwoLayers(nn.Module):
    def __init__(self, *, hidden: int = 3, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(2, hidden, dtype=dtype)
        self.second = nn.Linear(hidden, 1, dtype=dtype)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(batch)))


def stepped(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, 2, dtype=dtype)).sum().backward()
    optimizer.step()
    return optimizer


def adam_state(model: nn.Module | None = None, **arguments: Any) -> OptimizerState:
    model = model or TwoLayers()
    return OptimizerState(stepped(Adam(model.parameters(), **arguments), model), {"model": model})


def first_weight(state: OptimizerState) -> Any:
    model: Any = state.modules["model"]
    return model.first.weight


def refused(live: OptimizerState, saved: Any) -> str:
    with pytest.raises(StateMismatchError) as caught:
        live.check_state_dict(saved)
    assert caught.value.remedy
    return str(caught.value)


# Names.


def test_state_and_groups_are_keyed_by_the_names_of_torchs_distributed_state_dict() -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = TwoLayers()
    optimizer = stepped(AdamW(model.parameters()), model)
    theirs: Any = get_optimizer_state_dict(model, optimizer)
    ours = OptimizerState(optimizer, {"model": model}).state_dict()
    assert list(ours["state"]) == list(theirs["state"])
    for name, moments in theirs["state"].items():
        assert list(ours["state"][name]) == list(moments)
    assert [group["params"] for group in ours["param_groups"]] == [
        group["params"] for group in theirs["param_groups"]
    ]


def test_the_state_holds_the_live_tensors_themselves() -> None:
    live = adam_state()
    moments = live.state_dict()["state"]["first.weight"]
    parameter = first_weight(live)
    assert moments["exp_avg"] is live.optimizer.state[parameter]["exp_avg"]


def test_one_optimizer_over_two_modules_names_parameters_by_module() -> None:
    modules = {"generator": TwoLayers(), "discriminator": TwoLayers()}
    both = SGD([p for module in modules.values() for p in module.parameters()])
    names = OptimizerState(both, modules).state_dict()["parameters"]
    assert "generator.first.weight" in names
    assert "discriminator.first.weight" in names
    alone = SGD(modules["discriminator"].parameters())
    assert "first.weight" in OptimizerState(alone, modules).state_dict()["parameters"]


def test_two_optimizers_get_their_own_moments_back(stored: Any, assert_same: Any) -> None:
    modules = {"a": TwoLayers(), "b": TwoLayers()}
    saved = {}
    for name, module in modules.items():
        optimizer = stepped(Adam(module.parameters()), module)
        saved[name] = stored(OptimizerState(optimizer, modules).state_dict())
    for name, module in modules.items():
        fresh = OptimizerState(Adam(module.parameters()), modules)
        fresh.check_state_dict(saved[name])
        fresh.load_state_dict(saved[name])
        assert_same(fresh.state_dict(), saved[name])


def test_a_parameter_outside_every_module_is_named_by_its_position(
    stored: Any, assert_same: Any
) -> None:
    def state_of(temperature: nn.Parameter, model: nn.Module) -> OptimizerState:
        groups: Any = [{"params": model.parameters()}, {"params": [temperature]}]
        return OptimizerState(Adam(groups), {"model": model})

    temperature, model = nn.Parameter(torch.ones(())), TwoLayers()
    running = state_of(temperature, model)
    (temperature * model(torch.ones(1, 2)).sum()).backward()
    running.optimizer.step()
    saved = stored(running.state_dict())
    assert "group1.param0" in saved["state"]
    fresh = state_of(nn.Parameter(torch.ones(())), TwoLayers())
    fresh.check_state_dict(saved)
    fresh.load_state_dict(saved)
    assert_same(fresh.state_dict(), saved)


def test_two_parameters_with_one_name_are_refused() -> None:
    inner = TwoLayers()
    clash: Any = nn.Module()
    clash.register_module("group0", nn.Module())
    clash.group0.register_parameter("param1", nn.Parameter(torch.ones(1)))
    optimizer = SGD([clash.group0.param1, inner.first.bias])
    with pytest.raises(ConfigurationError, match="two parameters have this name"):
        OptimizerState(optimizer, {"model": clash}).state_dict()


# In place, exactly.


def test_groups_lr_tensors_and_existing_moments_keep_their_identity(stored: Any) -> None:
    saved = stored(adam_state(lr=torch.tensor(0.5), foreach=False).state_dict())
    live = adam_state(lr=torch.tensor(0.1), foreach=False)
    group = live.optimizer.param_groups[0]
    lr, groups, state = group["lr"], live.optimizer.param_groups, live.optimizer.state
    moment = live.optimizer.state[first_weight(live)]["exp_avg"]
    live.load_state_dict(saved)
    assert live.optimizer.param_groups is groups
    assert live.optimizer.state is state
    assert live.optimizer.param_groups[0] is group
    assert group["lr"] is lr
    assert lr.item() == 0.5
    assert live.optimizer.state[first_weight(live)]["exp_avg"] is moment
    assert torch.equal(moment, saved["state"]["first.weight"]["exp_avg"])


def test_groups_that_shared_one_lr_tensor_part_where_the_saved_values_differ(stored: Any) -> None:
    def state_of(model: TwoLayers, *lrs: torch.Tensor) -> OptimizerState:
        layers = (model.first, model.second)
        groups = [
            {"params": layer.parameters(), "lr": lr} for layer, lr in zip(layers, lrs, strict=True)
        ]
        return OptimizerState(Adam(groups, foreach=False), {"model": model})

    saved = stored(state_of(TwoLayers(), torch.tensor(0.1), torch.tensor(0.2)).state_dict())
    shared = torch.tensor(0.5)
    live = state_of(TwoLayers(), shared, shared)
    live.load_state_dict(saved)
    found = [group["lr"] for group in live.optimizer.param_groups]
    assert found == [torch.tensor(0.1), torch.tensor(0.2)]


def test_new_moments_take_the_memory_of_the_loaded_state(stored: Any) -> None:
    saved = stored(adam_state().state_dict())
    model = TwoLayers()
    live = OptimizerState(Adam(model.parameters()), {"model": model})
    live.load_state_dict(saved)
    theirs = saved["state"]["first.weight"]["exp_avg"]
    ours = live.optimizer.state[model.first.weight]["exp_avg"]
    assert torch.equal(ours, theirs)
    assert ours.data_ptr() == theirs.data_ptr()


def test_moments_wider_than_their_parameter_are_restored_bit_for_bit(
    stored: Any, assert_same: Any
) -> None:
    running = adam_state(TwoLayers(dtype=torch.bfloat16))
    for moments in running.optimizer.state.values():
        moments["exp_avg"] = moments["exp_avg"].float() + 1e-6
    saved = stored(running.state_dict())
    model = TwoLayers(dtype=torch.bfloat16)
    fresh = OptimizerState(Adam(model.parameters()), {"model": model})
    fresh.load_state_dict(saved)
    assert_same(fresh.state_dict(), saved)
    theirs = Adam(model.parameters())
    theirs.load_state_dict(running.optimizer.state_dict())
    assert theirs.state[model.first.weight]["exp_avg"].dtype == torch.bfloat16


def test_moments_keep_their_layout_in_memory(stored: Any) -> None:
    model = nn.Conv2d(3, 4, 2)
    model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
    optimizer = Adam(model.parameters())
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    optimizer.step()
    saved = stored(OptimizerState(optimizer, {"model": model}).state_dict())
    fresh = Adam(model.parameters())
    OptimizerState(fresh, {"model": model}).load_state_dict(saved)
    moment = fresh.state[model.weight]["exp_avg"]
    assert moment.stride() == model.weight.stride() != torch.empty(moment.shape).stride()


def test_one_tensor_that_all_parameters_share_stays_one(stored: Any) -> None:
    running = adam_state(foreach=False)
    count = torch.tensor(1.0)
    for moments in running.optimizer.state.values():
        moments["count"] = count
    saved = stored(running.state_dict())
    model = TwoLayers()
    fresh = OptimizerState(Adam(model.parameters()), {"model": model})
    fresh.load_state_dict(saved)
    assert len({id(moments["count"]) for moments in fresh.optimizer.state.values()}) == 1


def test_state_that_is_created_with_the_optimizer_is_filled_in_place(stored: Any) -> None:
    def state_of(model: nn.Module) -> OptimizerState:
        return OptimizerState(Adagrad(model.parameters()), {"model": model})

    running = state_of(TwoLayers())
    stepped(running.optimizer, running.modules["model"])
    saved = stored(running.state_dict())
    live = state_of(TwoLayers())
    parameter = first_weight(live)
    total = live.optimizer.state[parameter]["sum"]
    live.load_state_dict(saved)
    assert live.optimizer.state[parameter]["sum"] is total
    assert torch.equal(total, saved["state"]["first.weight"]["sum"])


def test_state_of_a_parameter_without_saved_state_goes(stored: Any) -> None:
    model = TwoLayers()
    saved = stored(OptimizerState(Adam(model.parameters()), {"model": model}).state_dict())
    live = adam_state()
    assert live.optimizer.state
    live.load_state_dict(saved)
    assert not live.optimizer.state


def test_values_of_any_shape_are_restored(stored: Any, assert_same: Any) -> None:
    class Odd(SGD):
        pass

    def state_of(model: nn.Module) -> OptimizerState:
        return OptimizerState(Odd(model.parameters(), lr=0.1), {"model": model})

    running = state_of(TwoLayers())
    parameter = first_weight(running)
    running.optimizer.state[parameter] = {
        "name": "text",
        "pair": (torch.ones(2), None),
        "history": [torch.zeros(1), [torch.ones(1, dtype=torch.int64)]],
        "nested": {"deep": {0: torch.ones(())}},
    }
    running.optimizer.state["global"] = {"count": 3}
    saved = stored(running.state_dict())
    fresh = state_of(TwoLayers())
    fresh.check_state_dict(saved)
    fresh.load_state_dict(saved)
    assert_same(fresh.state_dict(), saved)


def test_further_keys_of_an_optimizers_state_are_restored(stored: Any) -> None:
    class Counting(SGD):
        """Counts in an entry of its own beside ``state`` and ``param_groups``."""

        count = 0

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.register_state_dict_post_hook(
                lambda optimizer, state: {**state, "count": cast(Counting, optimizer).count}
            )
            self.register_load_state_dict_pre_hook(
                lambda optimizer, state: cast(Counting, optimizer).take(state["count"])
            )

        def take(self, count: int) -> None:
            self.count = count

    def state_of(model: nn.Module) -> OptimizerState:
        return OptimizerState(Counting(model.parameters(), lr=0.1), {"model": model})

    running, fresh = state_of(TwoLayers()), state_of(TwoLayers())
    running.optimizer.count = 3
    saved = stored(running.state_dict())
    fresh.check_state_dict(saved)
    fresh.load_state_dict(saved)
    assert fresh.optimizer.count == 3


def test_a_count_of_steps_that_an_older_torch_kept_as_a_number_becomes_a_tensor(
    stored: Any,
) -> None:
    saved = stored(adam_state(foreach=False).state_dict())
    for moments in saved["state"].values():
        moments["step"] = float(moments["step"])
    live = adam_state(foreach=False)
    live.check_state_dict(saved)
    live.load_state_dict(saved)
    counts = [moments["step"] for moments in live.optimizer.state.values()]
    assert counts == [torch.tensor(1.0)] * 4
    stepped(live.optimizer, live.modules["model"])
    assert counts == [torch.tensor(2.0)] * 4


def test_keys_that_the_checkpoint_lacks_keep_their_live_value(stored: Any) -> None:
    saved = stored(adam_state().state_dict())
    del saved["param_groups"][0]["amsgrad"]
    live = adam_state(amsgrad=True)
    live.check_state_dict(saved)
    live.load_state_dict(saved)
    assert live.optimizer.param_groups[0]["amsgrad"] is True


def test_parameter_names_given_to_torch_stay_those_of_this_run(stored: Any) -> None:
    def state_of(model: nn.Module, prefix: str) -> OptimizerState:
        named = [(prefix + name, p) for name, p in model.named_parameters()]
        return OptimizerState(Adam(named), {"model": model})

    saved = stored(state_of(TwoLayers(), "module.").state_dict())
    live = state_of(TwoLayers(), "")
    live.check_state_dict(saved)
    live.load_state_dict(saved)
    assert live.optimizer.param_groups[0]["param_names"][0] == "first.weight"


def test_groups_in_another_order_within_find_their_own_moments(
    stored: Any, assert_same: Any
) -> None:
    saved = stored(adam_state().state_dict())
    model = TwoLayers()
    backwards = Adam(list(model.parameters())[::-1])
    live = OptimizerState(backwards, {"model": model})
    live.check_state_dict(saved)
    live.load_state_dict(saved)
    assert_same(live.state_dict()["state"]["first.bias"], saved["state"]["first.bias"])


# Hooks and optimizers of other kinds.


def test_load_hooks_run_and_may_change_what_is_loaded(stored: Any) -> None:
    saved = stored(adam_state(lr=0.5).state_dict())
    live = adam_state(lr=0.1)
    called: list[str] = []

    def halve(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        called.append("before")
        changed = copy.deepcopy(state)
        changed["param_groups"][0]["lr"] /= 2
        return changed

    live.optimizer.register_load_state_dict_pre_hook(halve)
    live.optimizer.register_load_state_dict_post_hook(lambda _: called.append("after"))
    live.load_state_dict(saved)
    assert called == ["before", "after"]
    assert live.optimizer.param_groups[0]["lr"] == 0.25


def test_an_optimizer_with_its_own_load_is_loaded_by_it(stored: Any) -> None:
    class OwnLoad(Adam):
        num_loads = 0

        def load_state_dict(self, state_dict: Any) -> None:
            self.num_loads += 1
            super().load_state_dict(state_dict)

    model = TwoLayers()
    running = OptimizerState(stepped(OwnLoad(model.parameters()), model), {"model": model})
    saved = stored(running.state_dict())
    model = TwoLayers()
    fresh = OptimizerState(OwnLoad(model.parameters()), {"model": model})
    fresh.check_state_dict(saved)
    fresh.load_state_dict(saved)
    assert fresh.optimizer.num_loads == 1
    moment = fresh.optimizer.state[model.first.weight]["exp_avg"]
    assert torch.equal(moment, saved["state"]["first.weight"]["exp_avg"])


class Opaque:
    """An object that only has state_dict and load_state_dict."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {"anything": [torch.ones(1)]}

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def test_an_object_with_state_dict_only_is_stored_as_it_gives_itself(stored: Any) -> None:
    running, live = OptimizerState(Opaque(), {}), OptimizerState(Opaque(), {})
    running.optimizer.values["anything"][0] += 1
    saved = stored(running.state_dict())
    live.check_state_dict(saved)
    live.load_state_dict(saved)
    assert live.optimizer.values["anything"][0].item() == 2
    assert "Opaque" in refused(adam_state(), saved)
    assert "Opaque" in refused(live, stored(adam_state().state_dict()))


# Refused before anything is changed.


def test_another_optimizer_class_is_refused_with_both_names(stored: Any) -> None:
    saved = stored(adam_state().state_dict())
    model = TwoLayers()
    message = refused(OptimizerState(SGD(model.parameters()), {"model": model}), saved)
    assert "torch.optim.adam.Adam" in message
    assert "torch.optim.sgd.SGD" in message
    assert "exclude" in message


def test_a_class_that_moved_within_its_package_is_the_same_class(stored: Any) -> None:
    saved = stored(adam_state().state_dict())
    saved["class"] = "torch.optim.moved.Adam"
    adam_state().check_state_dict(saved)
    saved["class"] = "apex.optim.adam.Adam"
    assert "apex" in refused(adam_state(), saved)


def test_a_renamed_parameter_is_refused_with_both_names(stored: Any) -> None:
    class Renamed(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.fist = self.first
            del self.first

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.second(torch.relu(self.fist(batch)))

    message = refused(adam_state(Renamed()), stored(adam_state().state_dict()))
    assert "'fist.weight'" in message
    assert "'first.weight'" in message
    assert "1 more" in message


def test_a_missing_and_an_unexpected_parameter_are_named(stored: Any) -> None:
    class Longer(TwoLayers):
        def __init__(self) -> None:
            super().__init__()
            self.third_of_all = nn.Linear(7, 7)

    longer, shorter = adam_state(Longer()), adam_state()
    message = refused(shorter, stored(longer.state_dict()))
    assert "third_of_all.weight" in message
    assert "no such parameter" in message
    message = refused(longer, stored(shorter.state_dict()))
    assert "third_of_all.weight" in message
    assert "not in the checkpoint" in message


def test_another_shape_or_dtype_is_refused_with_both(stored: Any) -> None:
    saved = stored(adam_state().state_dict())
    message = refused(adam_state(TwoLayers(hidden=5)), saved)
    assert "float32 (3, 2)" in message
    assert "float32 (5, 2)" in message
    message = refused(adam_state(TwoLayers(dtype=torch.float64)), saved)
    assert "float32 (3, 2)" in message
    assert "float64 (3, 2)" in message


def test_a_pair_of_numbers_may_be_a_list_and_not_an_empty_one(stored: Any) -> None:
    saved = stored(adam_state().state_dict())
    saved["param_groups"][0]["betas"] = [0.9, 0.999]
    adam_state().check_state_dict(saved)
    others: list[Any] = [[], torch.Size(())]
    for other in others:
        saved["param_groups"][0]["betas"] = other
        assert "betas" in refused(adam_state(), saved)


def test_an_integer_that_torch_does_not_take_is_refused(stored: Any) -> None:
    saved = stored(adam_state().state_dict())
    saved["param_groups"][0]["eps"] = 1
    adam_state().check_state_dict(saved)
    saved["param_groups"][0]["eps"] = 1 << 70
    assert "eps" in refused(adam_state(), saved)


def test_another_division_into_groups_is_refused(stored: Any) -> None:
    def state_of(*groups: list[str]) -> OptimizerState:
        model = TwoLayers()
        parameters = dict(model.named_parameters())
        chosen = [{"params": [parameters[name] for name in group]} for group in groups]
        return OptimizerState(Adam(chosen), {"model": model})

    weights, biases = ["first.weight", "second.weight"], ["first.bias", "second.bias"]
    saved = stored(state_of(weights, biases).state_dict())
    message = refused(state_of(weights + biases), saved)
    assert "2 groups" in message
    message = refused(state_of([*weights, "first.bias"], ["second.bias"]), saved)
    assert "first.bias: in param group 1, expected in group 0" in message


def test_a_tensor_lr_on_one_side_only_is_refused(stored: Any) -> None:
    with_float = adam_state(lr=0.1)
    with_tensor = adam_state(lr=torch.tensor(0.1), foreach=False)
    message = refused(with_float, stored(with_tensor.state_dict()))
    assert "param_groups[0]['lr']: float32 () in the checkpoint, expected a float" in message
    message = refused(with_tensor, stored(with_float.state_dict()))
    assert "a float in the checkpoint, expected float32 ()" in message


def test_another_order_is_refused_for_lbfgs_which_keeps_one_flat_vector(stored: Any) -> None:
    model = TwoLayers()
    forwards = torch.optim.LBFGS(model.parameters())
    saved = stored(OptimizerState(forwards, {"model": model}).state_dict())
    backwards = torch.optim.LBFGS(list(model.parameters())[::-1])
    assert "second.bias" in refused(OptimizerState(backwards, {"model": model}), saved)


@pytest.mark.parametrize("state", [None, [], {}, {"class": 3}, {"class": "torch.optim.adam.Adam"}])
def test_what_is_no_optimizer_state_is_refused(state: Any) -> None:
    with pytest.raises(InvalidStateError, match="optimizer"):
        adam_state().check_content("optimizer", state)


def test_a_check_changes_nothing(stored: Any, assert_same: Any) -> None:
    saved = stored(adam_state(lr=0.5).state_dict())
    live = adam_state(lr=0.1)
    before = stored(live.state_dict())
    live.check_state_dict(saved)
    assert_same(live.state_dict(), before)


def test_the_fingerprint_names_class_sizes_and_hyperparameters() -> None:
    found = adam_state(lr=0.5, weight_decay=0.1).fingerprint()
    assert found["class"] == "torch.optim.adam.Adam"
    group = found["param_groups"][0]
    assert (group["num_parameters"], group["lr"], group["weight_decay"]) == (4, 0.5, 0.1)
    assert "params" not in group


# ---------------------------------------------------------------- content


@pytest.mark.parametrize("step", [torch.zeros(5), torch.zeros(3, 2)], ids=["five", "of a weight"])
def test_a_count_of_steps_that_is_several_numbers_is_refused(step: torch.Tensor) -> None:
    state = adam_state()
    content = state.state_dict()
    state.check_content("optimizer", content)
    for values in content["state"].values():
        values["step"] = step
    with pytest.raises(InvalidStateError, match=r"optimizer: state\.\S+\.step"):
        state.check_content("optimizer", content)
