"""What objects that were not written to be saved keep in their attributes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from resumekit.capture import HeldState
from resumekit.errors import StateMismatchError

KEY = "callbacks/attributes"


class Holder:
    """An object with attributes of its own."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Counter:
    """An object with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def held(*foreign: Any, **holders: Any) -> HeldState:
    return HeldState(holders, key=KEY, foreign=lambda: foreign)


def passed_on(saved: HeldState, live: HeldState, stored: Any) -> tuple[str, ...]:
    state = stored(saved.state_dict())
    live.check_state_dict(state)
    remarks = live.load_state_dict(state)
    live.put_back()
    return remarks


def test_tensors_and_containers_of_them_come_back_in_place(stored: Any) -> None:
    old = Holder(sum=torch.ones(2), shadow={"a": torch.ones(1), "n": 1}, rows=[torch.zeros(1)])
    new = Holder(sum=torch.zeros(2), shadow={"a": torch.zeros(1), "n": 0}, rows=[])
    live_sum, live_weight = new.sum, new.shadow["a"]
    assert passed_on(held(one=old), held(one=new), stored) == ()
    assert new.sum is live_sum
    assert new.shadow["a"] is live_weight
    assert (new.sum.tolist(), new.shadow["n"], len(new.rows)) == ([1.0, 1.0], 1, 1)


def test_modules_and_objects_with_a_state_come_back(stored: Any) -> None:
    model = nn.Linear(2, 1)
    average = AveragedModel(model)
    average.update_parameters(model)
    old, new = Holder(ema=average, count=Counter(3)), Holder(count=Counter())
    new.ema = AveragedModel(nn.Linear(2, 1))
    passed_on(held(one=old), held(one=new), stored)
    assert new.count.count == 3
    assert new.ema.n_averaged == 1
    assert torch.equal(new.ema.module.weight, model.weight)


def generators() -> Holder:
    return Holder(
        torch=torch.Generator().manual_seed(1),
        numpy=np.random.default_rng(2),
        legacy=np.random.RandomState(3),
        python=random.Random(4),
    )


def drawn(holder: Holder) -> list[float]:
    one = torch.rand((), generator=holder.torch).item()
    return [one, holder.numpy.random(), holder.legacy.rand(), holder.python.random()]


def test_private_generators_come_back_where_they_were(stored: Any) -> None:
    old, new = generators(), generators()
    start = drawn(old)
    live = new.numpy
    passed_on(held(one=old), held(one=new), stored)
    assert new.numpy is live
    assert drawn(new) == drawn(old) != start


def test_a_generator_that_is_not_there_is_an_error(stored: Any) -> None:
    with pytest.raises(StateMismatchError, match=r"one\.torch: a list"):
        passed_on(held(one=generators()), held(one=Holder(torch=[])), stored)


def test_a_number_counts_if_it_changed_and_stands_beside_state(stored: Any) -> None:
    old, idle = Holder(sum=torch.ones(1), num=0, decay=0.9), Holder(num=0)
    saved = held(one=old, idle=idle)
    old.num, idle.num, old.late = 7, 7, 2
    new = Holder(sum=torch.zeros(1), num=0, decay=0.5)
    assert saved.state_dict().keys() == {"one"}
    passed_on(saved, held(one=new), stored)
    assert (new.num, new.late, new.decay) == (7, 2, 0.5)  # a setting stays that of the script


def test_what_belongs_to_others_is_left_out() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    data = DataLoader([torch.ones(1)])  # type: ignore[arg-type]
    one = Holder(
        model=model,
        body=nn.Sequential(model),
        parameters=list(model.parameters()),
        view=model.weight.data,
        optimizer=optimizer,
        data=data,
        loss=nn.MSELoss(),
        kind=nn.Linear,
        name="a",
        num=1,
    )
    one.num = 2
    assert held(model, optimizer, one=one).state_dict() == {}


def test_attributes_that_are_made_later_come_back_when_they_are_put_back(stored: Any) -> None:
    old, new = Holder(sum=torch.ones(1)), Holder(sum=None)
    live = held(one=new)
    live.load_state_dict(stored(held(one=old).state_dict()))
    assert live.state_dict()["one"]["values"]["sum"].item() == 1  # also if it is saved before that
    new.sum = torch.zeros(1)
    live.put_back()
    live.put_back()
    assert new.sum.item() == 1
    new.sum += 1
    assert live.state_dict()["one"]["values"]["sum"].item() == 2


def test_an_object_that_is_gone_is_told(stored: Any) -> None:
    (remark,) = passed_on(held(a=Holder(sum=torch.ones(1))), held(b=Holder()), stored)
    assert remark.startswith("a: ")


def test_an_object_with_a_state_that_is_not_there_is_an_error(stored: Any) -> None:
    live = held(one=Holder())
    with pytest.raises(StateMismatchError, match=r"one\.count"):
        passed_on(held(one=Holder(count=Counter(1))), live, stored)


def test_an_object_that_says_its_own_state_is_asked(stored: Any) -> None:
    old, new = Counter(4), Counter()
    passed_on(held(one=old), held(one=new), stored)
    assert new.count == 4


def test_another_state_is_refused() -> None:
    with pytest.raises(StateMismatchError):
        held().check_state_dict({"one": 3})


def test_what_others_set_and_a_module_that_never_changes_are_left_out(stored: Any) -> None:
    def trainer() -> Holder:
        return Holder(mean=nn.Linear(1, 1), teacher=nn.Linear(1, 1), sum=torch.ones(1), num=0)

    def of(holder: Holder) -> HeldState:
        names = {"one": {"sum", "num"}}
        return HeldState({"one": holder}, key=KEY, foreign=lambda: (), left_out=names)

    old, new = trainer(), trainer()
    saved, untouched = of(old), new.teacher.weight.item()
    assert saved.state_dict() == {}
    old.num = 5
    old.mean.weight.data.add_(1.0)  # torch counts no such change
    assert saved.state_dict()["one"]["objects"].keys() == {"mean"}
    live = of(new)
    passed_on(saved, live, stored)
    assert torch.equal(new.mean.weight, old.mean.weight)
    assert (new.num, new.teacher.weight.item()) == (0, untouched)
    assert live.state_dict()["one"]["objects"].keys() == {"mean"}


def test_large_tensors_are_left_out_until_they_change(stored: Any) -> None:
    def trainer() -> Holder:
        large = torch.zeros(2**19)
        return Holder(samples=large.clone(), bank=[large.clone(), 0], sum=torch.ones(1))

    old, new = trainer(), trainer()
    saved, live = (
        HeldState({"one": each}, key=KEY, foreign=lambda: (), left_out={"one": ()})
        for each in (old, new)
    )
    assert saved.state_dict()["one"]["values"].keys() == {"sum"}
    old.bank[0][3] = 1.0
    assert saved.state_dict()["one"]["values"].keys() == {"sum", "bank"}
    passed_on(saved, live, stored)
    assert (new.bank[0][3], new.samples.sum()) == (1.0, 0.0)
    assert live.state_dict()["one"]["values"].keys() == {"sum", "bank"}
