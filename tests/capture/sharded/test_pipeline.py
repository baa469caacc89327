"""The states of pipeline stages as one state, and what one stage needs of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from resumekit.capture.model import ModelState
from resumekit.capture.nested_state import merge_states, union
from resumekit.capture.optimizer import OptimizerState, part_of
from resumekit.errors import StateMismatchError


def layers(*names: str, width: int = 3) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(width, width) for name in names})


def trained(model: nn.Module, **options: Any) -> OptimizerState:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for layer in model.children():
        layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return OptimizerState(optimizer, {"model": model})


def test_dicts_of_several_groups_are_joined_and_equal_values_kept() -> None:
    first = {"a": torch.ones(2), "deep": {"x": 1}, "count": 3}
    second = {"b": torch.zeros(2), "deep": {"y": 2}, "count": 3}
    whole = union("state", [first, second])
    assert list(whole) == ["a", "deep", "count", "b"]
    assert whole["deep"] == {"x": 1, "y": 2}
    assert part_of(ModelState(nn.ParameterDict({"b": torch.zeros(2)})), whole).keys() == {"b"}


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, 2),
        (1, 1.0),
        (torch.ones(2), torch.zeros(2)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        ([1, 2], [1]),
        ({"a": 1}, 3),
    ],
    ids=str,
)
def test_different_values_under_one_name_are_refused(value: Any, other: Any) -> None:
    with pytest.raises(StateMismatchError, match="state: x: y"):
        union("state", [{"x": {"y": value}}, {"x": {"y": other}}])


def test_optimizers_of_stages_become_one_and_are_cut_in_another_way() -> None:
    stages = [trained(layers("0", "1")), trained(layers("2", "3"))]
    whole = merge_states(stages[0], "optimizer", [each.state_dict() for each in stages])
    assert len(whole["param_groups"]) == 1
    assert len(whole["param_groups"][0]["params"]) == len(whole["state"]) == 8

    middle = trained(layers("1", "2"))
    part = part_of(middle, whole)
    assert part["param_groups"][0]["params"] == ["1.weight", "1.bias", "2.weight", "2.bias"]
    middle.check_state_dict(part)
    middle.load_state_dict(part)
    loaded = middle.state_dict()["state"]
    assert torch.equal(loaded["1.weight"]["exp_avg"], whole["state"]["1.weight"]["exp_avg"])
    assert torch.equal(loaded["2.bias"]["exp_avg"], whole["state"]["2.bias"]["exp_avg"])

    everything = trained(layers("0", "1", "2", "3"))
    everything.check_state_dict(whole)
    everything.load_state_dict(whole)


def test_rates_of_their_own_stay_with_their_parameters() -> None:
    stages = [trained(layers("0"), lr=0.1), trained(layers("1"), lr=0.2)]
    whole = merge_states(stages[0], "optimizer", [each.state_dict() for each in stages])
    assert [group["lr"] for group in whole["param_groups"]] == [0.1, 0.2]
    assert part_of(trained(layers("1")), whole)["param_groups"][0]["lr"] == 0.2
    with pytest.raises(StateMismatchError, match=r"param_groups\[0\]\['lr'\]: 0.1 for 0.weight"):
        part_of(trained(layers("0", "1")), whole)


def test_rates_that_are_tensors_are_compared_by_value() -> None:
    rates = [torch.tensor(0.1), torch.tensor(0.2)]
    stages = [trained(layers(str(n)), lr=rate) for n, rate in enumerate(rates)]
    whole = merge_states(stages[0], "optimizer", [each.state_dict() for each in stages])
    assert len(whole["param_groups"]) == 2
    without_values = [each.state_dict() for each in stages]
    for state in without_values:
        state["param_groups"][0]["lr"] = torch.empty((), device="meta")
    assert len(merge_states(stages[0], "optimizer", without_values)["param_groups"]) == 1


def test_optimizers_of_two_classes_are_refused() -> None:
    model = layers("0")
    other = OptimizerState(torch.optim.SGD(model.parameters(), 0.1), {"model": model})
    with pytest.raises(StateMismatchError, match="optimizer: class"):
        merge_states(other, "optimizer", [trained(layers("1")).state_dict(), other.state_dict()])


def test_a_parameter_that_no_stage_had_is_missing() -> None:
    whole = merge_states(None, "optimizer", [trained(layers("0")).state_dict()])
    live = trained(layers("0", "1"))
    with pytest.raises(StateMismatchError, match=r"1\.weight"):
        live.check_state_dict(part_of(live, whole))
