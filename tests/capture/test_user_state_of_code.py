"""State that functions, classes, modules and objects of libraries keep."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from contextlib import nullcontext
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.user_state import UserState
from resumekit.errors import StateMismatchError
from resumekit.state import Fidelity

KEY = "variables"
scale = 1.0


class Script:
    """What the script has."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

        def __setattr__(self, name: str, value: Any) -> None: ...


def followed(**objects: Any) -> UserState:
    """User state that follows functions and classes."""
    state = UserState(objects, key=KEY)
    state.lead({}, tuple)
    return state


def saved_as(slots: list[Any], *nodes: Any) -> dict[str, Any]:
    """A state as a checkpoint has it."""
    lists: dict[str, Any] = {"data": [], "lost": [], "first": {}, "holders": {}}
    return {"slots": slots, "nodes": json.dumps(nodes), **lists}


def passed_on(saved: UserState, live: UserState, stored: Any) -> None:
    state = stored(saved.state_dict())
    live.check_state_dict(state)
    live.load_state_dict(state)
    live.restore_now()


def closure() -> Callable[[], list[float]]:
    rate, rows = 1.0, list[float]()

    def step() -> list[float]:
        nonlocal rate
        rate /= 2
        rows.append(rate)
        return rows

    return step


def default() -> Callable[[], list[float]]:
    def step(rows: list[float] = []) -> list[float]:  # noqa: B006 - it is the state
        rows.append(len(rows) + 0.5)
        return rows

    return step


def attribute() -> Callable[[], list[float]]:
    def step() -> list[float]:
        rows: list[float] = step.__dict__.setdefault("rows", [])
        rows.append(len(rows) + 0.25)
        return rows

    return step


def class_attribute() -> Callable[[], list[float]]:
    class Steps:
        rows: list[float] = []  # noqa: RUF012 - it is the state

        @classmethod
        def step(cls) -> list[float]:
            cls.rows.append(len(cls.rows) + 2.0)
            return cls.rows

    return Steps.step


def arguments_of_a_partial() -> Callable[[], list[float]]:
    def step(rows: list[float]) -> list[float]:
        rows.append(len(rows) + 3.0)
        return rows

    return functools.partial(step, [])


def method_of_a_class_in_a_partial() -> Callable[[], list[float]]:
    rows: list[float] = []
    append = functools.partial(list.append, rows)

    def step() -> list[float]:
        append(len(append.args[0]) + 7.0)
        return list(append.args[0])

    return step


def decorated() -> Callable[[], list[float]]:
    inner = closure()

    @functools.wraps(inner)
    def step() -> list[float]:
        return inner()

    return step


def method_of_a_list() -> Callable[[], list[float]]:
    rows: list[float] = []
    append = rows.append

    def step() -> list[float]:
        append(len(append.__self__) + 4.0)  # type: ignore[attr-defined]
        return list(append.__self__)  # type: ignore[attr-defined]

    return step


def hook_of_a_module() -> Callable[[], list[float]]:
    layer, rows = nn.Linear(1, 1), list[float]()
    layer.register_forward_hook(lambda *_: rows.append(len(rows) + 5.0))

    def step() -> list[float]:
        layer(torch.ones(1))
        return rows

    return step


def hook_of_a_state_dict() -> Callable[[], list[float]]:
    layer, rows = nn.Linear(1, 1), list[float]()
    layer.register_state_dict_pre_hook(lambda *_: rows.append(len(rows) + 8.0))

    def step() -> list[float]:
        layer.state_dict()
        return rows

    return step


def hook_of_a_tensor() -> Callable[[], list[float]]:
    weight, rows = torch.ones(1, requires_grad=True), list[float]()
    weight.register_hook(lambda *_: rows.append(len(rows) + 6.0))

    def step() -> list[float]:
        weight.sum().backward()
        return rows

    return step


MAKERS = [
    closure,
    default,
    attribute,
    class_attribute,
    arguments_of_a_partial,
    method_of_a_class_in_a_partial,
    decorated,
    method_of_a_list,
    hook_of_a_module,
    hook_of_a_state_dict,
    hook_of_a_tensor,
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_the_state_of_a_function_is_restored(make: Any, stored: Any) -> None:
    old, new = make(), make()
    saved, live = followed(here=Script(step=old)), followed(here=Script(step=new))
    for _ in range(3):
        old()
    passed_on(saved, live, stored)
    assert new() == old()


FOLLOWED_ALONE = [each for each in MAKERS if each is not arguments_of_a_partial]  # has no code


@pytest.mark.parametrize("make", FOLLOWED_ALONE, ids=lambda make: make.__name__)
def test_without_following_code_it_is_lost(make: Any, stored: Any) -> None:
    old, new = make(), make()
    saved = UserState({"here": Script(step=old)}, key=KEY)
    live = UserState({"here": Script(step=new)}, key=KEY)
    for _ in range(3):
        old()
    passed_on(saved, live, stored)
    assert new() != old()


def halve() -> float:
    global scale
    scale /= 2
    return scale


def uses_code() -> Any:
    return halve(), UserState, functools, print


def test_a_global_of_the_script_is_restored(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "scale", 1.0)
    saved = followed(here=Script(step=halve))
    halve()
    state = saved.state_dict()
    assert [entry[:3] for entry in state["slots"]] == [[__name__, "global", "scale"]]
    monkeypatch.setitem(globals(), "scale", 1.0)
    live = followed(here=Script(step=halve))
    live.load_state_dict(stored(state))
    live.restore_now()
    assert scale == 0.5


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("global", "UserState"),
        ("global", "functools"),
        ("global", "halve"),
        ("global", "__builtins__"),
        ("global", "print"),
        ("global", "no_name_of_the_script"),
        ("attribute", "scale"),
    ],
)
def test_a_checkpoint_sets_no_code_and_no_other_name(role: str, name: str) -> None:
    before = dict(globals())
    live = followed(here=Script(step=uses_code))
    slot = [__name__, role, name, 3]
    live.load_state_dict(saved_as([slot]))
    is_refused = name in ("halve", "UserState", "functools", "__builtins__") and role == "global"
    with pytest.raises(StateMismatchError, match=name) if is_refused else nullcontext():
        live.restore_now()
    assert dict(globals()) == before


@pytest.mark.parametrize("value", [[0], 3])
def test_a_checkpoint_does_not_replace_a_function_or_a_class(value: Any) -> None:
    one = Script(step=halve, kind=Script)
    for name in ("step", "kind"):
        live = followed(one=one)
        slots = [["one", "attribute", name, value]]
        node = ["object", f"{__name__}.closure", "builtins.function"]
        live.load_state_dict(saved_as(slots, node))
        with pytest.raises(StateMismatchError):
            live.restore_now()
    assert (one.step, one.kind) == (halve, Script)


def test_a_class_that_holds_its_own_object_is_walked() -> None:
    """The check of a protocol adds ``__annotations__`` to the class that is walked."""
    kind: Any = type("Registry", (), {"instance": None, "__module__": __name__})
    kind.instance = kind()
    state = followed(one=Script(registry=kind))
    kind.instance.count = 1
    assert [entry[2] for entry in state.state_dict()["slots"]] == ["count"]


class Phase(Enum):
    """An enumeration whose members count."""

    WARM = "warm"
    MAIN = "main"

    def __init__(self, _: str) -> None:
        self.hits = 0


class Mode(str, Enum):
    """Members that are texts."""

    FAST = "fast"


@pytest.mark.parametrize("member", [Phase.WARM, Mode.FAST])
@pytest.mark.parametrize("make", [lambda m: m, lambda m: [m], lambda m: {m: 1}, type])
def test_the_attributes_of_a_member_are_restored(make: Any, member: Any, stored: Any) -> None:
    member.hits = 0
    state = followed(one=Script(value=make(member)))
    member.hits = 3
    saved = state.state_dict()
    assert [entry[2] for entry in saved["slots"]] == ["hits"]
    member.hits = 0
    live = followed(one=Script(value=make(member)))
    live.check_state_dict(stored(saved))
    live.load_state_dict(stored(saved))
    live.restore_now()
    assert member.hits == 3


def test_a_function_that_is_replaced_is_reported() -> None:
    one = Script(step=halve)
    saved = followed(one=one)
    one.step = closure
    (line,) = saved.findings()
    assert (line.key, line.fidelity) == ("one.step", Fidelity.LOST)


@functools.lru_cache
def drawn(_: int) -> float:
    return random.random()


@functools.lru_cache
def squared(number: int) -> int:
    return number**2


def test_a_cache_is_reported_if_its_function_draws_random_numbers() -> None:
    saved = followed(one=Script(drawn=drawn, squared=squared))
    squared(3)
    assert saved.findings() == ()
    drawn(3)
    assert [line.key for line in saved.findings()] == ["one.drawn"]


# ---------------------------------------------------------------- objects of libraries


class Lookahead(torch.optim.SGD):
    """Slow weights, a count and an inner optimizer, which its ``state_dict`` lacks."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count = 0
        self.base = torch.optim.SGD(self.param_groups[0]["params"], lr=0.5, momentum=0.5)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()
        super().step()
        self.count += 1
        for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
            slow.lerp_(p.detach(), 0.5)


def test_what_the_state_dict_of_an_optimizer_lacks_is_restored(stored: Any) -> None:
    def made() -> tuple[nn.Linear, Lookahead, UserState]:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = Lookahead(model.parameters())
        foreign = [model, optimizer, optimizer.state, optimizer.param_groups]
        state = UserState({}, key=KEY, foreign=lambda: [*foreign, *model.parameters()])
        state.lead({"optimizer": Holder(optimizer, attributes_only=True, is_saved=True)}, tuple)
        return model, optimizer, state

    (model, old, saved), (_, new, live) = made(), made()
    for _ in range(3):
        old.zero_grad()
        model(torch.ones(2)).sum().backward()
        old.step()
    old.base.param_groups[0]["lr"] = 0.25
    passed_on(saved, live, stored)
    assert new.count == 3
    assert new.base.param_groups[0]["lr"] == 0.25
    for one, other in zip(old.slow, new.slow, strict=True):
        assert torch.equal(one, other)
    of_old, of_new = old.base.state.values(), new.base.state.values()
    for then, now in zip(of_old, of_new, strict=True):
        assert torch.equal(then["momentum_buffer"], now["momentum_buffer"])
    assert [*new.base.state] == new.param_groups[0]["params"]


def test_what_torch_keeps_in_an_optimizer_is_left_to_its_component() -> None:
    """Also where the framework's list of what is saved lacks it, as one inside DeepSpeed's."""
    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=0.1, momentum=0.9)
    state = UserState({}, key=KEY)
    state.lead({"optimizer": Holder(optimizer, attributes_only=True, is_saved=True)}, tuple)
    weights.grad = torch.ones(2)
    optimizer.step()
    assert state.state_dict()["slots"] == []


def test_an_optimizer_a_scheduler_and_a_loader_that_nobody_gave_are_restored(stored: Any) -> None:
    def made() -> Script:
        torch.manual_seed(0)
        critic = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(critic.parameters())
        factors = [1.0]
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.arange(8.0))
        sampler = RandomSampler(data, generator=generator)
        return Script(
            critic=critic,
            optimizer=optimizer,
            scheduler=LambdaLR(optimizer, lambda _: factors[-1]),
            factors=factors,
            loader=DataLoader(data, sampler=sampler),
        )

    def trained(script: Script, steps: int) -> list[Any]:
        for _ in range(steps):
            script.optimizer.zero_grad()
            script.critic(torch.ones(2)).sum().backward()
            script.optimizer.step()
            script.factors.append(script.factors[-1] / 2)
            script.scheduler.step()
            found = [batch.item() for (batch,) in script.loader]
        return [*found, *(p.tolist() for p in script.critic.parameters())]

    old, new = made(), made()
    saved, live = followed(here=old), followed(here=new)
    trained(old, 3)
    passed_on(saved, live, stored)
    assert trained(new, 2) == trained(old, 2)


def test_a_generator_that_is_made_in_the_loop_is_made_again(stored: Any) -> None:
    """As that of an environment that is reset there."""
    makers = (np.random.default_rng, np.random.RandomState, random.Random, torch.Generator)
    for make in makers:
        old, new = Script(generator=None), Script(generator=None)
        saved, live = followed(here=old), followed(here=new)
        old.generator = make()
        passed_on(saved, live, stored)
        assert type(new.generator) is type(old.generator)
        assert drawn_from(new.generator) == drawn_from(old.generator)


def drawn_from(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return torch.rand((), generator=generator).item()
    return float(generator.random() if hasattr(generator, "random") else generator.random_sample())


def test_an_array_of_objects_is_restored_in_place(stored: Any) -> None:
    old, new = (Script(rows=np.zeros((2, 2), dtype=object)) for _ in range(2))
    saved, live = followed(here=old), followed(here=new)
    old.rows[0, 1] = (1, np.ones(2), [torch.ones(1)])
    rows = new.rows
    passed_on(saved, live, stored)
    assert new.rows is rows
    assert repr(rows) == repr(old.rows)


def test_a_sparse_tensor_is_looked_at_and_reported_when_it_changes() -> None:
    one = Script(graph=torch.eye(3).to_sparse())
    saved = followed(one=one)
    assert saved.findings() == ()
    one.graph = one.graph * 2
    assert [(line.key, line.fidelity) for line in saved.findings()] == [
        ("one.graph", Fidelity.LOST)
    ]


def test_a_file_that_is_written_is_no_state(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+", encoding="utf-8") as file:
        assert followed(one=Script(file=file)).findings() == ()


# ---------------------------------------------------------------- limits


def test_more_objects_than_are_looked_through_are_one_unknown_line() -> None:
    one = Script(words={str(n): n for n in range(60_000)}, count=0)
    saved = followed(one=one)
    one.count = 1
    (line,) = saved.findings()
    assert (line.key, line.fidelity) == ("one.words", Fidelity.UNKNOWN)
    assert "50,000" in line.reason
    assert [entry[2] for entry in saved.state_dict()["slots"]] == ["count"]


def test_an_array_above_the_limit_is_reported_only_when_it_changes() -> None:
    one = Script(rows=torch.zeros(70_000_000))
    saved = followed(one=one)
    assert saved.findings() == ()
    one.rows += 1
    (line,) = saved.findings()
    assert (line.key, line.fidelity) == ("one.rows", Fidelity.LOST)


def test_objects_that_show_or_run_a_training_are_not_entered(tmp_path: Path) -> None:
    import logging

    import tqdm  # type: ignore[import-untyped]
    from torch.utils.hooks import RemovableHandle

    handle = nn.Linear(1, 1).register_forward_hook(lambda *_: None)
    one = Script(log=logging.getLogger("a"), bar=tqdm.tqdm(disable=True), handle=handle)
    saved = followed(one=one)
    one.bar.n = 5
    one.log.setLevel("ERROR")
    assert isinstance(handle, RemovableHandle)
    assert saved.findings() == ()
    assert saved.state_dict()["slots"] == []


@pytest.mark.parametrize(
    "make",
    [lambda: (1).__add__, lambda: ValueError(object()), lambda: compile("1", "", "eval")],
    ids=["a method of C", "an exception", "code"],
)
def test_what_is_known_by_its_text_is_the_same_in_each_launch(make: Any) -> None:
    """The address of an object is not."""
    first, second = ({"here": Script(step=make())} for _ in range(2))
    digests = [UserState(each, key=KEY).digests() for each in (first, second)]
    assert digests[0] == digests[1]
    assert "here.step" in digests[0]
