"""Tensors and arrays of user state that share memory, and gradients that no optimizer has."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resumekit.capture.user_state.memory import strides_of
from resumekit.capture.user_state.user_state import UserState
from resumekit.errors import InvalidStateError, StateMismatchError

KEY = "callbacks/attributes"


class Box:
    """An object with attributes."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


def user_state(box: Any) -> UserState:
    return UserState({"one": box}, key=KEY)


def restore(state: Any, live: UserState) -> None:
    live.check_state_dict(state)
    live.load_state_dict(state)
    live.restore_now()


def resumed(saved: UserState, box: Any, stored: Any) -> None:
    """Gives another launch's object the state of this one."""
    restore(stored(saved.state_dict()), user_state(box))


def by_training(box: Any) -> None:
    box.ring = torch.zeros(2, 4)
    box.first, box.second = box.ring.chunk(2)


def by_training_in_containers(box: Any) -> None:
    ring = torch.zeros(2, 4)
    box.ring, box.first = {"all": (ring, ring.t())}, [ring[0]]


def by_script_and_training(box: Any) -> None:
    box.first = box.script[1:]


def as_an_alias(box: Any) -> None:
    box.first = box.script


def as_an_array_of_a_tensor(box: Any) -> None:
    box.ring = torch.zeros(2, 4)
    box.first = box.ring.numpy()[::-1]


def as_a_tensor_of_an_array(box: Any) -> None:
    box.ring, box.first = box.array[:, 1], torch.from_numpy(box.array)


def as_arrays(box: Any) -> None:
    box.ring = np.zeros((2, 4), [("a", "i4"), ("b", "f8")])
    box.first = box.ring["b"]


def as_an_expanded_tensor(box: Any) -> None:
    box.ring = torch.zeros(1)
    box.first, box.second = box.ring.expand(3), box.ring.expand(2)


def as_parameters(box: Any) -> None:
    box.first = torch.zeros(6)
    box.net.weight.data, box.net.bias.data = box.first[:4].view(2, 2), box.first[4:]


MADE = (
    *(by_training, by_training_in_containers, by_script_and_training, as_an_alias),
    *(as_an_array_of_a_tensor, as_a_tensor_of_an_array, as_arrays, as_an_expanded_tensor),
    as_parameters,
)


def launch() -> Any:
    ring, net = torch.zeros(4), nn.Linear(2, 2).requires_grad_(False)
    for each in net.parameters():
        each.fill_(1.0)
    made = {"script": ring, "view": ring[2:], "array": np.zeros((3, 2)), "net": net}
    return Box(**made, ring=None, first=None, second=None)


def write(box: Any) -> str:
    """Writes into one of them; what all show then."""
    first = box.first[0] if isinstance(box.first, list) else box.first
    if isinstance(first, np.ndarray):
        first.flat[1] += 3
    elif 0 in first.stride():
        box.ring.add_(3)
    else:
        first[..., -1].add_(3)
    return repr({**vars(box), "net": [*box.net.parameters()]})


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("make", MADE)
def test_what_training_lets_share_memory_does_so_after_a_resume(
    make: Any, stored: Any, *, is_written: bool
) -> None:
    box, again = launch(), launch()
    saved, weight = user_state(box), again.net.weight
    make(box)
    if is_written:
        write(box)
    assert saved.findings() == ()
    for _ in range(2):  # as at the fetch of an epoch, and at that of its first batch
        resumed(saved, again, stored)
    assert again.net.weight is weight
    assert write(again) == write(box)
    assert (again.first is again.script) == (box.first is box.script)


@pytest.mark.parametrize("make", MADE)
def test_without_their_layout_they_differ(make: Any, stored: Any) -> None:
    box, again = launch(), launch()
    saved = user_state(box)
    make(box)
    state = stored(saved.state_dict())
    assert state.pop("sharing")
    restore(state, user_state(again))
    assert write(again) != write(box)


def test_memory_that_a_resume_has_shared_is_shared_after_the_next_one(stored: Any) -> None:
    box, again, third = launch(), launch(), launch()
    saved, next_saved = user_state(box), user_state(again)
    box.ring = np.zeros(4)
    box.first = box.ring[1:]
    restore(stored(saved.state_dict()), next_saved)
    resumed(next_saved, third, stored)
    third.first[0] = 1
    assert third.ring.tolist() == [0, 1, 0, 0]


class Metric:
    """Begins again with a value that no slot shows, and that is in two others at first."""

    __slots__ = ("__weakref__", "first", "second")

    def __init__(self) -> None:
        self.first = self.second = torch.zeros(1)


def test_one_tensor_in_two_slots_is_filled_only_where_it_was_in_both(stored: Any) -> None:
    box, again = Metric(), Metric()
    saved, default = user_state(box), again.first
    box.first, box.second = torch.ones(1), torch.full((1,), 2.0)
    resumed(saved, again, stored)
    assert (again.first.item(), again.second.item(), default.item()) == (1, 2, 0)
    box, again = Metric(), Metric()
    saved, default = user_state(box), again.first
    box.first.add_(3)
    resumed(saved, again, stored)
    assert again.first is again.second is default
    assert default.item() == 3


LONE: dict[str, Any] = {
    "every second element": torch.arange(6.0)[::2],
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "an array": np.arange(6.0).reshape(2, 3).T,
    "an array backwards": np.arange(6)[::-1],
}


@pytest.mark.parametrize("is_in_a_list", [True, False])
@pytest.mark.parametrize("value", LONE.values(), ids=LONE)
def test_elements_lie_as_they_did(value: Any, stored: Any, *, is_in_a_list: bool) -> None:
    """The order in memory decides in which order a product sums them up."""
    box, again = launch(), launch()
    saved = user_state(box)
    box.first = box.second = [value] if is_in_a_list else value
    for _ in range(2):
        resumed(saved, again, stored)
        (found,) = again.first if is_in_a_list else (again.first,)
        assert strides_of(found) == strides_of(value)
        assert found.tolist() == value.tolist()
        assert again.first is again.second


def test_of_a_column_of_a_large_matrix_its_elements_are_saved_alone(stored: Any) -> None:
    box, again = launch(), launch()
    saved = user_state(box)
    box.first = torch.zeros(1000, 1000)[:, 0]
    resumed(saved, again, stored)
    assert again.first.untyped_storage().nbytes() == 4000


def test_what_training_parts_is_two_after_a_resume(stored: Any) -> None:
    box, again = launch(), launch()
    saved = user_state(box)
    box.view = box.script[2:].clone()  # of the same elements
    resumed(saved, again, stored)
    again.view.add_(1)
    assert (again.script.tolist(), again.view.tolist()) == ([0, 0, 0, 0], [1, 1])


def test_views_of_the_script_are_filled_where_they_are(stored: Any) -> None:
    box, again = launch(), launch()
    saved, elsewhere = user_state(box), again.script.numpy()
    box.view.add_(1)
    former = again.script, again.view
    resumed(saved, again, stored)
    assert again.script is former[0]
    assert again.view is former[1]
    assert elsewhere.tolist() == [0, 0, 1, 1]


def test_a_view_of_what_is_not_changed_is_saved_without_it() -> None:
    box: Any = Box(large=torch.zeros(10**6), part=None)
    saved = UserState({"one": box}, key=KEY, limit_bytes=10**6)
    box.part = box.large[5:7]
    assert saved.findings() == ()
    state = saved.state_dict()
    assert [entry[2] for entry in state["slots"]] == ["part"]
    assert [each.numel() for each in state["data"]] == [2]


@pytest.mark.parametrize("kind", ["strided", "conjugate"])
def test_views_that_cannot_be_made_again_are_reported(kind: str) -> None:
    box: Any = Box(first=None, second=None)
    saved = user_state(box)
    if kind == "strided":
        ring = torch.zeros(10_000)
        box.first, box.second = ring[::1000], ring[1000::1000]
    else:
        box.first = torch.zeros(2, dtype=torch.complex64)
        box.second = box.first.conj()
    assert {each.key for each in saved.findings()} & {"one.first", "one.second"}


LAYOUT = ("one.script", 0, [(0, 0, [4])])


@pytest.mark.parametrize(
    "layouts",
    [
        3,
        [["one.script"]],
        [("one.script", 0, [(1, 0, [4])])],
        [("one.script", 0, [(0, -4, [4])])],
        [("one.script", 0, [(0, 0, [4, 4])])],
        [("one.script", 0, [(0, 0, ["4"])])],
        [("one.script", 0, [(0, 12, [4])])],
        [("one.script", 0, [(0, 2, [4])])],
        [("one.script", 0, [(0, 0, [5])])],
        [("one.script", 8, [(0, 0, [4])])],
        [("one.gone", 0, [(0, 0, [1 << 40])])],
    ],
)
def test_a_malformed_layout_is_refused_and_nothing_changes(layouts: Any) -> None:
    box = launch()
    live = user_state(box)
    rest: dict[str, Any] = {"lost": [], "first": {}, "holders": {}}
    nodes = '[["tensor",0,false,false,[]]]'
    slots = [["one", "attribute", "first", [0]]]
    state = {"slots": slots, "nodes": nodes, "data": [torch.ones(2)], **rest}

    def check_and_restore() -> None:
        live.check_content(live.key, {**state, "sharing": layouts})
        restore({**state, "sharing": layouts}, live)

    with pytest.raises((InvalidStateError, StateMismatchError)):
        check_and_restore()
    assert (box.first, box.script.tolist()) == (None, [0, 0, 0, 0])
    live.check_content(live.key, {**state, "sharing": [LAYOUT]})


# ---------------------------------------------------------------- gradients


def with_gradients() -> Any:
    free = torch.ones(2, requires_grad=True)
    return Box(free=free, box=[torch.ones(1, requires_grad=True)], net=nn.Linear(1, 1), kept=None)


def backward(box: Any) -> None:
    (box.free.sum() + box.box[0].sum() + box.net(torch.ones(1)).sum()).backward()


def gradients(box: Any) -> Any:
    return [repr(each.grad) for each in (box.free, *box.box, *box.net.parameters())]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_gradient_that_no_optimizer_has_is_restored(stored: Any, *, is_new: bool) -> None:
    box, again = with_gradients(), with_gradients()
    saved = user_state(box)
    if is_new:
        box.free = torch.ones(2, requires_grad=True)
    backward(box)
    box.kept = box.free.grad
    resumed(saved, again, stored)
    assert again.kept is again.free.grad
    for each in (box, again):
        backward(each)
    assert gradients(again) == gradients(box)
    assert again.kept.tolist() == [2, 2]


def test_a_gradient_that_is_cleared_is_none_after_a_resume(stored: Any) -> None:
    box, again = with_gradients(), with_gradients()
    for each in (box, again):
        backward(each)
    saved = user_state(box)
    box.free.grad = None
    resumed(saved, again, stored)
    assert again.free.grad is None
    assert again.box[0].grad is not None


def test_a_gradient_of_a_component_is_left_out() -> None:
    box = with_gradients()
    others = [box.net, box.free]
    saved = UserState({"one": box}, key=KEY, foreign=lambda: others)
    backward(box)
    assert [entry[2] for entry in saved.state_dict()["slots"]] == ["box"]


@pytest.mark.parametrize("kind", ["sparse", "with a graph"])
def test_a_gradient_that_cannot_be_saved_is_reported(kind: str) -> None:
    box: Any = Box(table=torch.ones(3, 2, requires_grad=True))
    saved = user_state(box)
    if kind == "sparse":
        nn.functional.embedding(torch.tensor([1]), box.table, sparse=True).sum().backward()
    else:
        (grad,) = torch.autograd.grad(box.table.square().sum(), box.table, create_graph=True)
        box.table.grad = grad
    (line,) = saved.findings()
    assert line.key == "one.table"
    box.table.grad = None


@pytest.mark.parametrize(
    "nodes",
    [
        '[["tensor",0,false,true,[[0]]]]',
        '[["tensor",0,false,true,[1]]]',
        '[["tensor",0,false,true,[[1]]],["tensor",1,false,false,[]]]',
        '[["tensor",0,false,true,[[1]]],["list",[],null]]',
    ],
)
def test_a_malformed_gradient_is_refused(nodes: str) -> None:
    box = SimpleNamespace(first=None)
    live = user_state(box)
    rest: dict[str, Any] = {"lost": [], "first": {}, "holders": {}}
    slots = [["one", "attribute", "first", [0]]]
    state = {"slots": slots, "nodes": nodes, "data": [torch.ones(2), torch.ones(3)], **rest}
    with pytest.raises(StateMismatchError):
        restore(state, live)
    assert box.first is None


# ---------------------------------------------------------------- other names of containers

CONTAINERS: dict[str, Any] = {
    "list": lambda: [1],
    "dict": lambda: {"a": 1},
    "set": lambda: {1},
    "deque": lambda: deque([1]),
    "bytearray": lambda: bytearray(b"a"),
}


def renamed(make: Any) -> tuple[Any, Any]:
    """A launch, and what it has under two paths."""
    kept = make()
    return Box(other=None, kept=kept, inner=Box(kept=kept)), kept


@pytest.mark.parametrize("is_in_a_list", [True, False])
@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_another_name_of_an_unchanged_container_is_restored(
    make: Any, stored: Any, *, is_in_a_list: bool
) -> None:
    (box, kept), (again, _) = renamed(make), renamed(make)
    saved = user_state(box)
    box.other = [kept] if is_in_a_list else kept
    resumed(saved, again, stored)
    other = again.other[0] if is_in_a_list else again.other
    assert other is again.kept
    assert other is again.inner.kept
    assert other == kept


def test_a_container_that_is_equal_alone_stays_another_one(stored: Any) -> None:
    (box, kept), (again, live) = renamed(lambda: [1]), renamed(lambda: [1])
    saved = user_state(box)
    box.other = [*kept]
    resumed(saved, again, stored)
    assert again.kept is live
    assert again.other is not live
    assert again.other == kept
