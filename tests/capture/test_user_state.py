"""What objects that were not written to be saved hold in their attributes."""

from __future__ import annotations

import functools
import gc
import inspect
import io
import json
import operator
import random
import socket
import subprocess
import sys
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Sequence
from enum import Enum, Flag
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from resumekit.capture.user_state.attributes import Holder as Root
from resumekit.capture.user_state.user_state import UserState
from resumekit.capture.user_state.value_types import Kind, kind_of_class
from resumekit.errors import InvalidStateError, StateMismatchError
from resumekit.state import Fidelity

KEY = "callbacks/attributes"
Transition = namedtuple("Transition", "obs action reward")


class Holder:
    """An object with attributes of its own."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


class Tally:
    """An object with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def saved_as(slots: list[Any], *nodes: Any, data: Sequence[Any] = ()) -> dict[str, Any]:
    """A state as a checkpoint has it."""
    rest: dict[str, Any] = {"lost": [], "first": {}, "holders": {}}
    return {"slots": slots, "nodes": json.dumps(nodes), "data": [*data], **rest}


class Slotted:
    __slots__ = ("late", "owner", "rate")

    def __init__(self, owner: Any = None) -> None:
        self.rate, self.owner = 1.0, owner


class Stage(Enum):
    WARM = 1
    FULL = 2


def user_state(*foreign: Any, **holders: Any) -> UserState:
    return UserState(holders, key=KEY, foreign=lambda: foreign)


def paths(state: UserState) -> set[str]:
    """The owners and names of the slots in its state."""
    return {f"{owner}.{name or role}" for owner, role, name, _ in state.state_dict()["slots"]}


def passed_on(saved: UserState, live: UserState, stored: Any) -> tuple[str, ...]:
    state = stored(saved.state_dict())
    live.check_state_dict(state)
    messages = live.load_state_dict(state)
    live.restore_now()
    return messages


def test_an_object_that_the_checkpoint_does_not_know_keeps_what_the_launch_gave_it(
    stored: Any,
) -> None:
    saved, new = user_state(one=Holder(count=0)), Holder(count=0)
    live = user_state(one=Holder(count=0), two=new)
    new.count = 5
    assert passed_on(saved, live, stored) == ()
    assert new.count == 5


def test_tensors_and_containers_are_restored_in_place(stored: Any) -> None:
    def made() -> Holder:
        return Holder(sum=torch.zeros(2), shadow={"a": torch.zeros(1), "n": 0}, rows=[], d=deque())

    old, new = made(), made()
    saved, live = user_state(one=old), user_state(one=new)
    old.sum += 1
    old.shadow["a"] += 1
    old.shadow["n"] = 1
    old.rows.append(torch.zeros(1))
    old.d = deque([1.5], maxlen=3)
    live_sum, live_weight, live_rows = new.sum, new.shadow["a"], new.rows
    assert passed_on(saved, live, stored) == ()
    assert new.sum is live_sum
    assert new.shadow["a"] is live_weight
    assert new.rows is live_rows
    assert (new.sum.tolist(), new.shadow["n"], len(new.rows)) == ([1.0, 1.0], 1, 1)
    assert (new.d, new.d.maxlen) == (deque([1.5]), 3)


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=2.0),
        Counter("abb"),
        defaultdict(list, a=[1]),
        pytest.param({1, "a"}, id="a set"),  # its repr is another one in each process
        frozenset({2}),
        (1, (2.0, [3])),
        {("a", 1): {2: [None, True, b"x", 1j]}},
        Transition(np.arange(3.0), 1, 0.5),
        [Transition(np.arange(3, dtype=np.int16), torch.ones(2), -0.0), float("nan")],
        Stage.FULL,
        [np.float32(0.1), torch.bfloat16, torch.Size([1, 2])],
    ],
    ids=repr,
)
def test_a_container_of_every_kind_is_restored(stored: Any, value: Any) -> None:
    old, new = Holder(value=None, slotted=Slotted()), Holder(value=None, slotted=Slotted())
    saved, live = user_state(one=old), user_state(one=new)
    old.value = value
    passed_on(saved, live, stored)
    assert type(new.value) is type(value)
    if isinstance(value, set):
        assert new.value == value
    else:
        assert repr(new.value) == repr(value)


def test_two_paths_to_one_object_are_restored_as_one(stored: Any) -> None:
    def made() -> Holder:
        return Holder(a=None, b=None, inner=Holder(rows=[]), also=None)

    old, new = made(), made()
    saved, live = user_state(one=old), user_state(one=new)
    old.a = old.b = [torch.zeros(1), {}]
    old.also = old.inner
    old.inner.rows.append(old.a)
    passed_on(saved, live, stored)
    assert new.a is new.b is new.inner.rows[0]
    assert new.also is new.inner


def test_attributes_in_slots_and_cycles_are_restored(stored: Any) -> None:
    def made() -> Holder:
        one = Holder()
        one.inner = Slotted(one)
        return one

    old, new = made(), made()
    saved, live = user_state(one=old), user_state(one=new)
    old.inner.rate, old.inner.late = 0.5, [3]
    passed_on(saved, live, stored)
    assert (new.inner.rate, new.inner.late) == (0.5, [3])
    assert new.inner.owner is new


def test_a_helper_object_and_a_buffer_of_objects_are_restored(stored: Any) -> None:
    def made() -> Holder:
        return Holder(helper=Slotted(), buffer=deque(maxlen=100))

    old, new = made(), made()
    saved, live = user_state(one=old), user_state(one=new)
    old.helper.rate = 0.25
    old.buffer.extend(Holder(obs=np.full(2, i), reward=float(i)) for i in range(5))
    passed_on(saved, live, stored)
    assert new.helper.rate == 0.25
    assert [each.reward for each in new.buffer] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [each.obs.tolist() for each in new.buffer] == [[i, i] for i in range(5)]


@pytest.mark.parametrize(
    "change", [torch.flip, torch.roll, "permute"], ids=["flip", "roll", "permute"]
)
def test_a_large_tensor_of_the_same_elements_in_another_order_is_saved(change: Any) -> None:
    one = Holder(bank=torch.arange(2**19, dtype=torch.float32))
    saved = user_state(one=one)
    assert paths(saved) == set()
    if change == "permute":
        one.bank = one.bank[torch.randperm(2**19)]
    else:
        one.bank = change(one.bank, 1, 0) if change is torch.roll else one.bank.flip(0)
    assert paths(saved) == {"one.bank"}


def test_modules_and_objects_with_a_state_are_restored(stored: Any) -> None:
    model = nn.Linear(2, 1)
    old = Holder(ema=AveragedModel(model), count=Tally(), nets={"a": [nn.BatchNorm1d(1)]})
    new = Holder(ema=AveragedModel(nn.Linear(2, 1)), count=Tally(), nets={"a": [nn.BatchNorm1d(1)]})
    saved, live = user_state(one=old), user_state(one=new)
    with torch.no_grad():
        model.weight += 1
    old.ema.update_parameters(model)
    old.count.count = 3
    old.nets["a"][0](torch.ones(2, 1))
    weight = new.ema.module.weight
    passed_on(saved, live, stored)
    assert new.count.count == 3
    assert new.ema.n_averaged == 1
    assert new.ema.module.weight is weight
    assert torch.equal(weight, old.ema.module.weight)
    assert new.nets["a"][0].num_batches_tracked == 1


def test_tied_parameters_stay_tied(stored: Any) -> None:
    def made() -> Holder:
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(False)
        net[1].weight = net[0].weight
        return Holder(net=net)

    old, new = made(), made()
    saved, live = user_state(one=old), user_state(one=new)
    old.net[0].weight += 1
    passed_on(saved, live, stored)
    assert new.net[0].weight is new.net[1].weight
    assert isinstance(new.net[0].weight, nn.Parameter)
    assert torch.equal(new.net[0].weight, old.net[0].weight)


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


def test_private_generators_are_restored(stored: Any) -> None:
    old, new = generators(), generators()
    saved, live = user_state(one=old), user_state(one=new)
    start = drawn(old)
    numpy = new.numpy
    passed_on(saved, live, stored)
    assert new.numpy is numpy
    assert drawn(new) == drawn(old) != start


def test_a_generator_that_is_not_there_is_an_error_and_nothing_changes(stored: Any) -> None:
    old, new = generators(), Holder(torch=[], count=0)
    saved, live = user_state(one=old), user_state(one=new)
    drawn(old)
    old.count = 3
    with pytest.raises(StateMismatchError, match=r"one\.torch"):
        passed_on(saved, live, stored)
    assert new.count == 0


def test_a_value_that_never_changed_stays_the_scripts(stored: Any) -> None:
    old, new = Holder(num=0, decay=0.9), Holder(num=0, decay=0.5)
    saved, live = user_state(one=old), user_state(one=new)
    old.num, old.late = 7, 2
    assert passed_on(saved, live, stored) == ()
    assert (new.num, new.late, new.decay) == (7, 2, 0.5)


def test_a_captured_cuda_graph_has_no_state() -> None:
    """What it computes is in the tensors that each replay writes."""
    assert kind_of_class(torch.cuda.CUDAGraph) is Kind.LEAF


def test_what_belongs_to_others_is_left_out() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    data: Any = DataLoader([torch.ones(1)])  # type: ignore[arg-type]
    one = Holder(model=None, body=None, parameters=None, view=None, optimizer=None, data=None)
    saved = user_state(model, optimizer, one=one)
    one.model, one.body = model, nn.Sequential(model)
    one.view, one.optimizer, one.data = model.weight.data, optimizer, data
    with torch.no_grad():
        model.weight += 1
    assert paths(saved) == set()


def test_a_module_that_refers_to_the_model_keeps_what_is_its_own() -> None:
    class Loss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model
            self.head = nn.Linear(1, 1)
            self.register_buffer("seen", torch.zeros(()))
            self.mean = torch.zeros(())

    model = nn.Linear(2, 1)
    loss: Any = Loss(model)
    saved = UserState({"loss": loss}, key=KEY, foreign=lambda: [model, *loss.head.parameters()])
    with torch.no_grad():
        model.weight += 1
        loss.head.weight += 1
    loss.seen += 1
    loss.mean = loss.mean + 1
    assert paths(saved) == {"loss.seen", "loss.mean"}


def test_objects_that_hooks_make_are_there_when_the_state_is_restored(stored: Any) -> None:
    old, new = Holder(ema=None), Holder(ema=None)
    saved, live = user_state(one=old), user_state(one=new)
    old.ema = nn.Linear(1, 1)
    saved.restore_now()  # the first batch follows
    old.ema.weight.data.fill_(3.0)
    state = stored(saved.state_dict())
    assert live.load_state_dict(state) == ()
    assert live.state_dict() == state  # also if it is saved before that
    new.ema = nn.Linear(1, 1)
    live.restore_now()
    live.restore_now()
    assert new.ema.weight.item() == 3.0
    new.ema.weight.data.fill_(4.0)
    assert "one.ema.weight" in paths(live)


def test_an_object_that_is_gone_is_reported(stored: Any) -> None:
    old = Holder(sum=torch.ones(1))
    saved = user_state(a=old)
    old.sum += 1
    (message,) = passed_on(saved, user_state(b=Holder()), stored)
    assert message == "not in this program, not restored: a.sum"


def test_an_object_with_a_state_that_is_not_there_is_an_error(stored: Any) -> None:
    old = Holder(count=Tally())
    saved = user_state(one=old)
    old.count.count = 1
    with pytest.raises(StateMismatchError, match=r"one\.count"):
        passed_on(saved, user_state(one=Holder()), stored)


def test_the_state_dict_of_a_holder_is_used(stored: Any) -> None:
    old, new = Tally(), Tally()
    saved, live = user_state(one=old), user_state(one=new)
    old.count = 4
    passed_on(saved, live, stored)
    assert new.count == 4
    attributes = UserState({"one": Root(old, attributes_only=True)}, key=KEY)
    old.count = 5
    assert paths(attributes) == {"one.count"}


@pytest.mark.parametrize(
    "state",
    [
        {"one": 3},
        saved_as([["one", "attribute", "a", [0]]]),
        saved_as([["one", "code", "a", 1]]),
        saved_as([], ["list", [[7]], None]),
        saved_as([], ["function", "os.system"]),
        saved_as([], ["list", 0, None]),
        saved_as([], ["list", 0, None], data=[3]),
        saved_as([], ["tensor", 0, False, False], data=["text"]),
        saved_as([], ["array", 1], data=[np.zeros(2)]),
        saved_as([], ["generator", "random.Random", -1], data=[3]),
        {**saved_as([]), "nodes": "[" * 100_000},
        {**saved_as([]), "nodes": "{}"},
        {**saved_as([]), "sharing": 3},
        {**saved_as([]), "sharing": [[["one.a"]]]},
    ],
    ids=[
        *("fields", "reference", "role", "item", "node", "no numbers", "no list", "no tensor"),
        *("no array", "no generator", "no JSON", "no table", "no sharing", "no paths"),
    ],
)
def test_a_malformed_state_is_refused(state: Any) -> None:
    with pytest.raises(InvalidStateError):
        user_state().check_content("callbacks/attributes", state)


@pytest.mark.parametrize("name", ["__class__", "__dict__", "step", "rate", "no name"])
def test_a_checkpoint_adds_no_attribute_that_the_class_defines(name: str) -> None:
    class Guarded:
        rate = property(lambda self: 1)

        def step(self) -> None: ...

    live = user_state(one=Guarded())
    slot = ["one", "attribute", name, 3]
    live.load_state_dict(saved_as([slot]))
    live.restore_now()
    assert vars(live._holders["one"].value) == {}


def test_what_library_code_sets_and_what_is_left_out_is_no_state() -> None:
    class Sampled(torch.utils.data.RandomSampler):
        def __init__(self) -> None:
            super().__init__([1, 2])
            self.count = 0

    one, other = Sampled(), Holder(mine=0, theirs=0)
    saved = UserState({"one": one, "other": Root(other, left_out={"theirs"})}, key=KEY)
    one.replacement = True
    one.count = other.mine = other.theirs = 1
    assert paths(saved) == {"one.count", "other.mine"}


# ---------------------------------------------------------------- what is not captured


def opened(folder: Path) -> io.TextIOWrapper:
    (folder / "lines").write_text("a\nb\n", encoding="utf-8")
    return (folder / "lines").open(encoding="utf-8")


@pytest.mark.parametrize("value", ["generator", "file", "iterator in a list"])
def test_what_nothing_can_read_is_reported_by_path(tmp_path: Path, value: str) -> None:
    with opened(tmp_path) as file:
        made = {"generator": (n for n in [1]), "file": file, "iterator in a list": [iter([1])]}
        (line,) = user_state(one=Holder(source=made[value])).findings()
    assert (line.key, line.fidelity) == ("one.source", Fidelity.UNKNOWN)
    assert line.reason.endswith('transient={"one.source"}')


def test_what_another_process_sends_is_reported_and_one_that_sends_nothing_is_not() -> None:
    """What it sends next depends on its own state, as that of a simulator."""
    one, other = socket.socketpair()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as simulator:
        sources = {"process": simulator, "pipe": simulator.stdout, "socket": one}
        lines = user_state(one=Holder(**sources)).findings()
        simulator.communicate()
    assert {line.key for line in lines} == {f"one.{name}" for name in sources}
    assert {line.fidelity for line in lines} == {Fidelity.UNKNOWN}
    one.close()
    other.close()
    with subprocess.Popen(["true"]) as silent:
        assert user_state(one=Holder(process=silent)).findings() == ()


def test_what_ordinary_scripts_keep_is_no_finding(tmp_path: Path) -> None:
    import logging
    import time

    one = Holder(
        log=logging.getLogger("x"),
        lock=threading.Lock(),
        path=tmp_path,
        began=time.time(),
        loss=0.0,
        step=lambda: None,
        pattern=__import__("re").compile("x"),
        writer=None,
    )
    saved = user_state(one=one)
    saved.restore_now()
    one.log, one.lock, one.path = logging.getLogger("y"), threading.Lock(), tmp_path / "a"
    one.began, one.loss = time.time(), 0.5
    one.writer = (tmp_path / "log").open("w", encoding="utf-8")
    assert saved.findings() == ()
    one.writer.close()


def test_an_object_above_the_limit_is_reported_with_its_size() -> None:
    one, two = Holder(large=torch.zeros(3 * 10**6)), Holder(small=0)
    saved = UserState({"one": one, "two": two}, key=KEY, limit_bytes=10**6)
    assert saved.findings() == ()  # its digest proves that it did not change
    one.large += 1
    two.small = 1
    (line,) = saved.findings()
    assert (line.key, line.fidelity) == ("one.large", Fidelity.LOST)
    assert line.reason.startswith("12 MB, above user_state_limit")
    assert paths(saved) == {"two.small"}
    saved.configure(transient={"one.large"}, limit_bytes=10**6)
    assert saved.findings() == ()


def test_an_object_too_large_to_be_digested_is_unknown_from_the_start() -> None:
    one = Holder(large=torch.zeros(5 * 10**6), small=0)  # above 16 times the limit
    saved = UserState({"one": one}, key=KEY, limit_bytes=10**6)
    (line,) = saved.findings()
    assert (line.key, line.fidelity) == ("one.large", Fidelity.UNKNOWN)
    assert line.reason.startswith("20 MB, above user_state_limit")


def test_a_frozen_module_does_not_count_against_the_limit_until_it_changes() -> None:
    reward = torch.nn.Linear(1000, 1000).eval()
    one = Holder(reward=reward, history=torch.zeros(200 * 1000))  # 4 MB, and 0.8 MB
    saved = UserState({"one": one}, key=KEY, limit_bytes=10**6)
    one.history += 1
    assert saved.findings() == ()
    assert paths(saved) == {"one.history"}
    reward.weight.data.mul_(0.5)  # as a reference model that follows the policy
    (line,) = saved.findings()
    assert (line.key, line.fidelity) == ("one.reward.weight", Fidelity.LOST)
    assert paths(saved) == {"one.history"}


def test_changes_are_saved_up_to_the_limit_in_total() -> None:
    a, b = (Holder(x=torch.zeros(150 * 1000)) for _ in range(2))  # 0.6 MB each
    saved = UserState({"a": a, "b": b}, key=KEY, limit_bytes=10**6)
    a.x += 1
    assert saved.findings() == ()
    b.x += 1
    assert [line.key for line in saved.findings()] == ["b.x"]
    assert paths(saved) == {"a.x"}


@pytest.mark.parametrize("name", ["one.cache", "cache", "cache.rows"])
def test_transient_names_are_neither_saved_nor_reported(name: str) -> None:
    one = Holder(cache=Holder(rows=[], it=None), cached=0)
    saved = UserState({"one": one}, key=KEY, transient={name})
    one.cache.rows.append(1)
    one.cached = 1
    assert paths(saved) == {"one.cached"}


SECRET = ("hf_token", "token", "apiKey", "api_key", "password", "wandb_secret", "credentials")
NOT_SECRET = ("tokens", "token_count", "key_padding", "tokenizer", "pad_token", "sort_key")


@pytest.mark.parametrize("name", SECRET)
def test_secrets_are_neither_saved_nor_restored(stored: Any, name: str) -> None:
    old, new = Holder(n=0, **{name: "a"}), Holder(n=0, **{name: "b"})
    saved, live = user_state(one=old), user_state(one=new)
    setattr(old, name, "s3cr3t")
    old.n = 1
    state = saved.state_dict()
    assert "s3cr3t" not in repr(state)
    state["slots"].append(["one", "attribute", name, "other"])
    live.load_state_dict(state)
    live.restore_now()
    assert getattr(new, name) == "b"


@pytest.mark.parametrize("name", NOT_SECRET)
def test_names_of_text_and_data_are_no_secrets(name: str) -> None:
    one = Holder(**{name: "a"})
    saved = user_state(one=one)
    setattr(one, name, "b")
    assert paths(saved) == {f"one.{name}"}


def test_floats_are_left_out_of_what_two_runs_are_compared_by() -> None:
    one, other = Holder(t=0.0, n=0, rows=[]), Holder(t=0.0, n=0, rows=[])
    states = user_state(one=one), user_state(one=other)
    for each, clock in ((one, 1.5), (other, 2.5)):
        each.t, each.n, each.rows = clock, 3, [clock, 1]
    compared = [each.comparable_state() for each in states]
    assert compared[0] == compared[1] != {}
    other.n = 4
    assert states[1].comparable_state() != compared[0]


def test_a_table_of_a_former_version_is_read() -> None:
    old = Holder(weights=torch.zeros(2), names=["a"], box=np.zeros(2), again=None)
    live = user_state(one=old)
    nodes = [
        ["tensor", torch.ones(2), False, False],
        ["list", ["b", 3], None],
        ["array", np.ones(2)],
    ]
    slots = [
        ["one", "attribute", name, value]
        for name, value in (("weights", [0]), ("names", [1]), ("box", [2]), ("again", [1]))
    ]
    state = {"slots": slots, "nodes": nodes, "first": {}, "lost": [], "holders": {}}
    live.check_state_dict(state)
    live.load_state_dict(state)
    live.restore_now()
    assert (old.weights.tolist(), old.names, old.box.tolist()) == ([1, 1], ["b", 3], [1, 1])
    assert old.again is old.names


def test_an_object_keeps_its_path_when_a_shorter_one_leads_to_it(stored: Any) -> None:
    def made() -> tuple[Holder, UserState]:
        script = Holder(inner=Holder(net=nn.Linear(2, 2)), alias=None)
        return script, user_state(script=script)

    script, saved = made()
    script.inner.net.weight.data.fill_(2.0)
    script.alias = script.inner.net
    assert saved.findings() == ()
    assert paths(saved) == {"script.alias", "script.inner.net.weight"}
    again, live = made()
    passed_on(saved, live, stored)
    assert again.alias is again.inner.net
    assert again.inner.net.weight.tolist() == [[2.0, 2.0], [2.0, 2.0]]


class Opened:
    """An object that no copy can be made of."""

    def __init__(self) -> None:
        self.module, self.lock = threading, threading.Lock()

    def default(self) -> int:
        return 0


class Uncopied(NamedTuple):
    step: int

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copy")


def ordered_with_an_attribute() -> Any:
    made = OrderedDict(step=1)
    made.module = threading  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    "value",
    [
        Opened(),
        [Opened()],
        {"module": threading, "lock": threading.Lock()},
        defaultdict(Opened().default, step=1),
        [defaultdict(Opened().default)],
        Uncopied(1),
        {"last": [Uncopied(1)]},
        ordered_with_an_attribute(),
    ],
)
def test_what_cannot_be_copied_is_no_obstacle(value: Any, stored: Any) -> None:
    running, live = Holder(value=value, count=0), Holder(value=value, count=0)
    saved, again = user_state(one=running), user_state(one=live)
    running.count = 1
    passed_on(saved, again, stored)
    assert live.count == 1
    assert again.findings() == ()


def test_a_class_whose_module_is_a_property_is_walked() -> None:
    namespace = {"__module__": property(lambda self: "elsewhere"), "__slots__": ("count",)}
    script: Any = type("Script", (), namespace)()
    script.count = 1
    state = user_state(script=script)
    script.count = 2
    assert paths(state) == {"script.count"}


@pytest.mark.parametrize("is_saved_elsewhere", [True, False])
def test_a_short_dict_that_is_saved_elsewhere_is_left_out(*, is_saved_elsewhere: bool) -> None:
    counts = {"steps": 0}
    script = Holder(counts=counts)
    state = user_state(*([counts] if is_saved_elsewhere else []), script=script)
    counts["steps"] += 1
    assert paths(state) == (set() if is_saved_elsewhere else {"script.counts"})


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.ASGD])
def test_an_optimizer_that_training_makes_is_reported(kind: Any) -> None:
    net = nn.Linear(2, 2)
    script = Holder(optimizer=torch.optim.SGD(net.parameters(), 0.1))
    given = [net, script.optimizer]
    state = UserState({"script": script}, key=KEY, foreign=lambda: given)
    script.optimizer = kind(net.parameters(), 0.2)
    (line,) = state.findings()
    assert (line.key, line.fidelity) == ("script.optimizer", Fidelity.LOST)
    assert "no launch can make" in line.reason


class Option(Flag):
    """Options that can be combined."""

    FIRST = 1
    SECOND = 2


class Named(dict[str, Any]):
    """A dict of a class of its own."""


class Marked(torch.Tensor):
    """A tensor of a class of its own."""


class Dice(random.Random):
    """A random generator of a class of its own."""


UNMADE: dict[str, Any] = {
    "a grad scaler": torch.amp.GradScaler("cpu"),
    "what C makes": operator.attrgetter("a"),
    "options": Option.FIRST | Option.SECOND,
    "a text of a class": type("Text", (str,), {})("text"),
    "a dict of a class": Named(count=1),
    "a tensor of a class": torch.zeros(2).as_subclass(Marked),
    "a generator of a class": Dice(1),
}


class Unread(Tally):
    """An object whose state cannot be stored."""

    def state_dict(self) -> Any:
        return {"count": operator.add} if self.count else {}


def test_what_cannot_be_stored_is_reported() -> None:
    live = Holder(new=None, tally=Unread(), count=0)
    state = user_state(holder=live)
    live.new, live.tally.count = [defaultdict(functools.partial(list))], 1
    reasons = {each.key: each.reason for each in state.findings()}
    assert reasons["holder.new"].startswith("a defaultdict of a partial that training made")
    assert "Unread that cannot be stored (UnsupportedValueError)" in reasons["holder.tally"]


@pytest.mark.parametrize("kind", ["WeakSet", "WeakKeyDictionary", "WeakValueDictionary"])
def test_containers_of_weak_references_are_reported_when_they_change(kind: str) -> None:
    tally = Tally(1)
    live = Holder(tally=tally, weak=getattr(weakref, kind)(), count=0)
    state = user_state(holder=live)
    assert state.findings() == ()
    if kind == "WeakSet":
        live.weak.add(tally)
    else:
        live.weak.update({tally: 1} if kind == "WeakKeyDictionary" else {"a": tally})
    assert [(each.key, each.fidelity) for each in state.findings()] == [
        ("holder.weak", Fidelity.LOST)
    ]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_made_by_script", [True, False])
@pytest.mark.parametrize("kind", ["quantized", "nested"])
def test_a_tensor_that_cannot_be_stored_is_reported(
    kind: str, stored: Any, *, is_made_by_script: bool
) -> None:
    def made(scale: float) -> Any:
        if kind == "nested":
            return torch.nested.nested_tensor([torch.full((2,), scale), torch.ones(3)])
        return torch.quantize_per_tensor(torch.full((4,), scale), 0.1, 0, torch.qint8)

    def holder() -> Holder:
        return Holder(new=made(1.0) if is_made_by_script else None, other=Holder(count=0))

    live, other = holder(), holder()
    state, restored = user_state(holder=live), user_state(holder=other)
    live.new, live.other.count = made(2.0), 1
    (line,) = state.findings()
    assert line.key == "holder.new"
    assert "a Tensor that cannot be stored" in line.reason
    passed_on(state, restored, stored)
    assert other.other.count == 1


@pytest.mark.parametrize("value", UNMADE.values(), ids=UNMADE)
@pytest.mark.parametrize("where", ["attribute", "item"])
def test_a_value_that_only_training_makes_is_reported_at_the_save(
    value: Any, where: str, stored: Any
) -> None:
    """Another launch has nothing to put it into: a resume would be refused, or silently wrong."""

    def made() -> tuple[Holder, UserState]:
        holder = Holder(new=None, items=["first"])
        return holder, user_state(holder=holder)

    (live, state), (other, restored) = made(), made()
    if where == "attribute":
        live.new = value
    else:
        live.items.append(value)
    (line,) = state.findings()
    name = "holder.new" if where == "attribute" else "holder.items"
    assert (line.key, line.fidelity) == (name, Fidelity.LOST)
    passed_on(state, restored, stored)
    assert (other.new, other.items) == (None, ["first"])


@pytest.mark.parametrize(
    ("value", "is_reachable"),
    [(Holder(a=1), True), (torch.distributions.Normal(0.0, 1.0), False)],
    ids=["of a module of the script's objects", "of another module"],
)
def test_a_new_object_is_saved_where_the_next_launch_can_make_it(
    value: Any, *, is_reachable: bool, stored: Any
) -> None:
    live, other = Holder(new=None), Holder(new=None)
    state = user_state(holder=live)
    live.new = value
    assert [each.key for each in state.findings()] == ([] if is_reachable else ["holder.new"])
    passed_on(state, user_state(holder=other), stored)
    assert type(other.new) is (Holder if is_reachable else type(None))


def test_paths_of_objects_that_have_gone_are_forgotten() -> None:
    state = user_state()
    for _ in range(5):
        state.add({"it": Holder(part=Holder())})
    gc.collect()
    state.add({"other": Holder()})
    assert sorted(path for path, _ in state._paths.values()) == ["it", "it.part", "other"]


def in_lists(depth: int) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made]
    return made


def in_objects(depth: int) -> Any:
    made = None
    for _ in range(depth // 2):
        made = Holder(before=[made])
    return made


def in_subclasses(depth: int) -> Any:
    made = None
    for _ in range(depth // 4):
        made = Ordered(before=made)
    return made


class Ordered(OrderedDict[str, Any]):
    """A class with state that no attribute shows."""


@pytest.mark.parametrize("nested", [in_lists, in_objects, in_subclasses])
@pytest.mark.parametrize("depth", [90, 250, 5000])
def test_what_is_nested_is_restored_or_reported(nested: Any, depth: int, stored: Any) -> None:
    """Also where the frames of a training take a part of the calls that Python allows."""
    limit = sys.getrecursionlimit()
    live, other = Holder(new=None), Holder(new=None)
    state, restored = user_state(holder=live), user_state(holder=other)
    live.new = nested(depth)
    sys.setrecursionlimit(len(inspect.stack()) + 800)
    try:
        (*lines,) = state.findings()
        passed_on(state, restored, stored)
    finally:
        sys.setrecursionlimit(limit)
    assert [each.key for each in lines] == ([] if depth == 90 else ["holder.new"])
    assert type(other.new) is type(live.new if depth == 90 else None)


def test_a_container_of_the_script_may_be_nested_deeply() -> None:
    holder = Holder(value=in_lists(400))
    (line,) = user_state(holder=holder).findings()
    assert (line.key, line.fidelity) == ("holder.value", Fidelity.UNKNOWN)


class Node:
    """An object with a number."""

    def __init__(self, count: int) -> None:
        self.count = count


def test_objects_that_training_makes_are_made_again_wherever_they_move(stored: Any) -> None:
    """An object of a heap has another index in each launch; which launch made it, that decides."""
    state: Any = None
    for number in range(1, 5):
        live = Holder(heap=[(0, Node(0))])
        saved = user_state(holder=live)
        if state is not None:
            saved.load_state_dict(state)
        for _ in range(2):  # as at the fetch of an epoch, and at that of its first batch
            saved.restore_now()
            saved.extend_baseline({"holder": live}, is_script=False)
        live.heap.insert(0, (-number, Node(number)))
        assert [each.count for _, each in live.heap] == [*range(number, -1, -1)]
        state = stored(saved.state_dict())


class Statistics:
    """What is computed from it once, stays."""

    def __init__(self) -> None:
        self.values = [1.0]

    @functools.cached_property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


def test_a_cached_property_keeps_its_first_value(stored: Any) -> None:
    live, again = Statistics(), Statistics()
    saved, state = user_state(of=live), user_state(of=again)
    assert live.mean == 1.0
    live.values.append(3.0)
    state.load_state_dict(stored(saved.state_dict()))
    state.restore_now()
    assert (again.mean, again.values) == (1.0, [1.0, 3.0])


class Log(bytearray):
    """Bytes with attributes."""


def test_an_object_derived_from_bytes_is_restored_twice(stored: Any) -> None:
    """As at the fetch of an epoch, and at that of its first batch."""
    live, again = Holder(log=Log(b"a")), Holder(log=Log(b"a"))
    saved, state = user_state(holder=live), user_state(holder=again)
    live.log.extend(b"bc")
    content = stored(saved.state_dict())
    for _ in range(2):
        state.load_state_dict(content)
        state.restore_now()
        assert again.log == b"abc"


def deletable(kind: str) -> Any:
    """An object with an attribute ``rate``."""
    made: Any = {"object": Holder(), "slots": Slotted(), "module": nn.Identity()}[kind]
    made.rate = torch.Generator() if kind == "module" else 1.0
    return made


@pytest.mark.parametrize("kind", ["object", "slots", "module"])
def test_an_attribute_that_training_deletes_stays_deleted(stored: Any, kind: str) -> None:
    live, content = Holder(it=deletable(kind)), None
    saved = user_state(one=live)
    assert paths(saved) == set()
    del live.it.rate
    for _ in range(3):  # also what a resumed launch saves
        content = stored(saved.state_dict())
        again = Holder(it=deletable(kind))
        assert hasattr(again.it, "rate")
        saved = user_state(one=again)
        saved.load_state_dict(content)
        saved.restore_now()
        assert not hasattr(again.it, "rate")
    again.it.rate = 3.0
    assert paths(saved) == {"one.it.rate"}


@pytest.mark.parametrize("kind", ["class", "function", "partial"])
def test_a_defaultdict_keeps_its_factory(stored: Any, kind: str) -> None:
    """As the meters of many training scripts, each of a class of theirs."""

    def meters() -> Any:
        factory: Any = {
            "class": Tally,
            "function": lambda: Tally(2),  # another one each time
            "partial": functools.partial(Tally),
        }
        made: Any = defaultdict(factory[kind])
        made["first"] = Tally(1)
        return made

    live, again = Holder(meters=meters()), Holder(meters=meters())
    saved = user_state(one=live)
    live.meters["loss"] = 0.5
    live.meters["first"].count = 7
    assert passed_on(saved, user_state(one=again), stored) == ()
    assert (again.meters["loss"], again.meters["first"].count) == (0.5, 7)
    assert again.meters["new"].count == {"function": 2}.get(kind, 0)


def test_a_defaultdict_that_training_freezes_stays_frozen(stored: Any) -> None:
    live, again = Holder(names=defaultdict(list)), Holder(names=defaultdict(list))
    saved = user_state(one=live)
    live.names.default_factory = None
    passed_on(saved, user_state(one=again), stored)
    with pytest.raises(KeyError):
        again.names["new"]


def test_a_defaultdict_that_training_makes_has_a_class_of_the_script(stored: Any) -> None:
    live, again = Holder(tally=Tally(), meters=None), Holder(tally=Tally(), meters=None)
    saved = user_state(one=live)
    live.meters = defaultdict(Tally, loss=0.5)
    passed_on(saved, user_state(one=again), stored)
    assert again.meters == {"loss": 0.5}
    assert type(again.meters["new"]) is Tally


def test_what_is_restored_before_the_hooks_of_the_start_is_saved_again() -> None:
    """Else the next checkpoint lacks it, and the launch after that begins without it."""

    def launch(loaded: dict[str, Any] | None = None) -> tuple[Holder, UserState]:
        holder = Holder(begun=1)
        state = UserState({"holder": Root(holder)}, key=KEY)
        state.lead({}, tuple)
        if loaded is not None:
            state.load_state_dict(loaded)
            state.restore_early()
            holder.made_by_a_hook = 3
        state.restore_now()
        return holder, state

    holder, state = launch()
    holder.factor = 0.5
    for _ in range(2):
        holder, state = launch(state.state_dict())
        assert holder.factor == 0.5
        assert [slot[2] for slot in state.state_dict()["slots"]] == ["factor"]
