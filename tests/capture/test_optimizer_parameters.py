"""Parameters of optimizers that no module of a run contains: found, named, checked, restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from resumekit import Checkpointer as BaseCheckpointer
from resumekit import StateComponent
from resumekit.adapters.torch import Checkpointer
from resumekit.capture.optimizer import OptimizerState
from resumekit.capture.slots import (
    parameter_components,
    registered_components,
    state_components,
    uncaptured_parameters,
)
from resumekit.errors import InexactError, StateMismatchError


class Partial(nn.Linear):
    """A module whose ``state_dict`` leaves out a parameter that is trained."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}bias"]

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def found(model: nn.Module, optimizer: Any, *others: StateComponent) -> dict[str, list[str]]:
    components = (*state_components(model=model, optimizer=optimizer), *others)
    return {each.key: list(each.stateful.state_dict()) for each in parameter_components(components)}


# Which parameters these are.


def test_a_parameter_outside_every_module_is_named_by_its_position() -> None:
    model, scale, shift = (
        nn.Linear(2, 2),
        torch.ones(1, requires_grad=True),
        nn.Parameter(torch.ones(())),
    )
    groups: Any = [{"params": [*model.parameters(), scale]}, {"params": [shift]}]
    optimizer = SGD(groups, lr=0.1)
    expected = ["group0.param2", "group1.param0"]
    assert found(model, optimizer) == {"optimizer/parameters": expected}


def test_it_has_the_name_that_the_optimizer_was_given() -> None:
    model, scale = nn.Linear(2, 2), torch.ones(1, requires_grad=True)
    optimizer = SGD([*model.named_parameters(), ("scale", scale)], lr=0.1)
    assert found(model, optimizer) == {"optimizer/parameters": ["scale"]}


def test_a_model_that_contains_everything_has_no_such_component() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    compiled: Any = torch.compile(model, backend="eager")
    assert found(compiled, SGD(model.parameters(), lr=0.1)) == {}


def test_a_parameter_that_the_state_dict_leaves_out_is_one_of_them() -> None:
    model = Partial(2, 2)
    assert found(model, SGD(model.parameters(), lr=0.1)) == {"optimizer/parameters": ["bias"]}


class PartialInPart(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.weight


def without_bias(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
    del state[f"{prefix}bias"]


@pytest.mark.parametrize("way", ["part", "hook", "hook of torch", "attribute"])
def test_whatever_leaves_a_parameter_out_of_the_state_is_noticed(way: str) -> None:
    layer = PartialInPart(2, 2) if way == "part" else nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Linear(2, 2))
    if way == "hook":
        layer._register_state_dict_hook(without_bias)
    elif way == "hook of torch":
        layer.register_state_dict_post_hook(without_bias)
    elif way == "attribute":
        rest = model[1].state_dict(prefix="1.")
        vars(model)["state_dict"] = lambda: {"0.weight": layer.weight, **rest}
    optimizer = SGD(model.parameters(), lr=0.1)
    assert found(model, optimizer) == {"optimizer/parameters": ["0.bias"]}


def test_a_module_that_is_registered_contains_its_parameters() -> None:
    model, head = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = SGD([*model.parameters(), *head.parameters()], lr=0.1)
    assert found(model, optimizer, *registered_components([head])) == {}


def test_a_model_with_a_custom_state_contains_tensors_in_its_memory() -> None:
    class Custom:
        def __init__(self) -> None:
            self.weight = nn.Parameter(torch.ones(3))

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"w": self.weight.detach()}

        def load_state_dict(self, state: Any) -> None:
            self.weight.data.copy_(state["w"])

    model = Custom()
    components = [
        StateComponent("model", model),
        StateComponent("optimizer", SGD([model.weight])),
    ]
    assert parameter_components(components) == ()


def test_each_optimizer_has_its_own_parameters() -> None:
    model, a, b = nn.Linear(2, 2), nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizers = {"first": SGD([*model.parameters(), a], lr=0.1), "second": SGD([b], lr=0.1)}
    assert found(model, optimizers) == {
        "optimizer/first/parameters": ["group0.param2"],
        "optimizer/second/parameters": ["group0.param0"],
    }


# What does not fit.


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (torch.ones(2), r"float32 \(2,\)"),
        (torch.ones(1, dtype=torch.float64), "float64"),
    ],
)
def test_another_shape_or_dtype_is_refused_and_changes_nothing(
    other: torch.Tensor, words: str
) -> None:
    scale = torch.ones(1, requires_grad=True)
    components = state_components(model=nn.Linear(1, 1), optimizer=SGD([scale], lr=0.1))
    (component,) = parameter_components(components)
    stateful: Any = component.stateful
    with pytest.raises(StateMismatchError, match=words):
        stateful.check_state_dict({"group0.param0": other})
    with pytest.raises(StateMismatchError, match="not in the checkpoint"):
        stateful.check_state_dict({})
    assert scale.item() == 1.0


def test_values_are_restored_in_place_under_their_names() -> None:
    scale = torch.ones(3, requires_grad=True)
    components = state_components(model=nn.Linear(1, 1), optimizer=SGD([scale], lr=0.1))
    (component,) = parameter_components(components)
    address = scale.data_ptr()
    component.stateful.load_state_dict({"group0.param0": torch.tensor([1.0, -0.0, 3.0])})
    assert scale.data_ptr() == address
    assert scale.requires_grad
    assert torch.equal(scale.detach(), torch.tensor([1.0, -0.0, 3.0]))


# In a run.


class Run:
    """A loop over a model and tensors of the script."""

    def __init__(self, directory: Path, *tensors: torch.Tensor, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.tensors = nn.Linear(2, 1), tensors
        self.optimizer = AdamW([*self.model.parameters(), *tensors], lr=0.1)
        self.checkpointer = Checkpointer(
            directory, model=self.model, optimizer=self.optimizer, **options
        )

    def train(self, *, steps: int, late: nn.Parameter) -> None:
        loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=1)
        with self.checkpointer:
            for (batch,) in self.checkpointer.batches(loader, steps=steps):
                self.optimizer.zero_grad()
                (self.model(batch).sum() * late.sum()).backward()
                self.optimizer.step()
                self.checkpointer.step()
                if self.checkpointer.progress.step == 1:
                    self.optimizer.add_param_group({"params": [late]})


def test_a_group_that_training_adds_is_in_the_next_checkpoint(tmp_path: Path) -> None:
    late = nn.Parameter(torch.full((1,), 0.5))
    Run(tmp_path, save_every=1, strict=True).train(steps=3, late=late)
    assert late.item() != 0.5
    live, again = Run(tmp_path), nn.Parameter(torch.zeros(1))
    live.optimizer.add_param_group({"params": [again]})
    report = live.checkpointer.resume()
    assert "optimizer/parameters" in [line.key for line in report.components]
    assert torch.equal(again, late)
    live.checkpointer.close()


def test_a_checkpoint_without_the_values_is_refused_unless_that_is_allowed(tmp_path: Path) -> None:
    scale = torch.ones(1, requires_grad=True)
    with Run(tmp_path).checkpointer as saver:
        saver.save()
    with pytest.raises(StateMismatchError, match="has no optimizer/parameters") as caught:
        Run(tmp_path, scale).checkpointer.resume()
    assert "allow_missing={'optimizer/parameters'}" in str(caught.value)


def test_an_optimizer_that_nothing_names_is_saved_too(tmp_path: Path) -> None:
    def components(scale: torch.Tensor) -> list[StateComponent]:
        model = nn.Linear(2, 1)
        optimizer = SGD([*model.parameters(), scale], lr=0.1)
        return [StateComponent("model", model), StateComponent("optimizer", optimizer)]

    with BaseCheckpointer(tmp_path, components=components(torch.full((2,), 7.0))) as saver:
        saver.save()
    live = torch.zeros(2)
    with BaseCheckpointer(tmp_path, components=components(live)) as loader:
        loader.resume()
    assert live.tolist() == [7.0, 7.0]


def test_what_cannot_be_saved_is_lost_by_name_and_refused_by_strict(tmp_path: Path) -> None:
    class Flattening(OptimizerState):
        """Its optimizer trains a flat copy of the parameters."""

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {}

        def load_state_dict(self, state: Any) -> tuple[str, ...]:
            return ()

        def lost_parameters(self) -> dict[str, torch.Tensor]:
            return {"group0.param0": torch.ones(1)}

        def named_parameters(self) -> dict[str, torch.Tensor]:
            return {}

    model = nn.Linear(2, 1)
    components = [
        StateComponent("model", model),
        StateComponent("optimizer", Flattening(SGD([torch.ones(1)]), {})),
    ]
    (line,) = uncaptured_parameters(components)
    assert "group0.param0" in str(line)
    assert "lost" in str(line)
    loader = DataLoader(TensorDataset(torch.ones(2, 2)))
    checkpointer = BaseCheckpointer(tmp_path, components=components, strict=True)
    with pytest.raises(InexactError, match="optimizer/parameters: lost"), checkpointer:
        next(checkpointer.batches(loader, epochs=1))
