"""A run whose parameters have other names than in its checkpoint, by one prefix or by a mapping."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import ConfigurationError, StateMismatchError
from resumekit.state import common_prefix_change
from resumekit.storage.store import Store

NUM_STEPS = 8


class Counting(nn.Module):
    """A layer with an attribute and a buffer that no state dict has."""

    loose: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0
        self.register_buffer("loose", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.loose += x.detach().mean(0)
        return x + self.num_calls * self.loose / 100


def make_net() -> nn.Sequential:
    """Two layers of one shape, a norm with buffers, and a layer with an attribute."""
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), Counting())


class Around(nn.Module):
    """A module that holds others as attributes, by name."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = part(x)
        return x


def as_net() -> nn.Module:
    return make_net()


def as_model() -> nn.Module:
    return Around(model=make_net())


def as_peft() -> nn.Module:
    return Around(base_model=Around(model=make_net()))


def as_wrapped() -> nn.Module:
    return nn.DataParallel(Around(module=make_net()))


class CrashError(Exception):
    """Stands for whatever ends a process."""


class Job:
    """A run that accumulates gradients over two batches and averages its weights."""

    def __init__(self, directory: Path, make: Callable[[], nn.Module], **options: Any) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.average = AveragedModel(self.model)
        data = TensorDataset(torch.arange(96.0).reshape(32, 3) / 96)
        self.loader = DataLoader(data, batch_size=2, shuffle=True)
        self.losses: list[str] = []
        self.checkpointer = Checkpointer(
            directory,
            model=self.model,
            optimizer=self.optimizer,
            ema=self.average,
            mid_accumulation="gradients",
            save_every=None,
            transient={"losses"},  # the judge's, of each launch
            **options,
        )

    def train(self, *, crash_at: int | None = None) -> Job:
        """One epoch; at the batch of the crash it saves, inside an accumulation window."""
        with suppress(CrashError), self.checkpointer:
            for (inputs,) in self.checkpointer.batches(self.loader, epochs=1):
                if self.checkpointer.progress.micro_step == crash_at:
                    raise CrashError
                loss = self.model(inputs).square().sum()
                loss.backward()
                self.losses.append(float(loss.detach()).hex())
                if self.checkpointer.progress.micro_step % 2:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.average.update_parameters(self.model)
                    self.checkpointer.step(loss=loss)
                if self.checkpointer.progress.micro_step + 1 == crash_at:
                    self.checkpointer.save()
        return self

    def state(self) -> list[Any]:
        """The bits that training leaves, without names."""
        values: Iterable[Tensor] = (
            *self.model.state_dict().values(),
            *self.average.state_dict().values(),
            *(v for each in self.optimizer.state.values() for v in each.values()),
        )
        return [value.tolist() for value in values]


def crashed(directory: Path, make: Callable[[], nn.Module]) -> Job:
    return Job(directory, make).train(crash_at=7)


CHANGES = [
    (as_net, as_model, "* -> model.*"),
    (as_model, as_net, "model.* -> *"),
    (as_peft, as_net, "base_model.model.* -> *"),
    (as_model, as_peft, "* -> base_model.*"),
    (as_wrapped, as_model, "module.* -> model.*"),
]


@pytest.mark.parametrize(("first", "then", "change"), CHANGES)
def test_one_prefix_is_found_and_all_that_has_names_follows(
    tmp_path: Path,
    first: Callable[[], nn.Module],
    then: Callable[[], nn.Module],
    change: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = Job(tmp_path / "whole", first).train()
    before = crashed(tmp_path / "run", first)
    capsys.readouterr()
    after = Job(tmp_path / "run", then).train()
    assert before.losses + after.losses == whole.losses
    assert after.state() == whole.state()
    message = f"parameter names: {change}"
    assert capsys.readouterr().err.count(message) == 1
    assert message in after.checkpointer.resume().changes
    newest = Store(tmp_path / "run").step_names()[0]
    details = json.loads((tmp_path / "run" / str(newest) / "manifest.json").read_text())["details"]
    assert details["changes"][-1]["changes"] == [message]


def test_equal_names_need_no_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, whole = crashed(tmp_path / "run", as_model), Job(tmp_path / "whole", as_model).train()
    after = Job(tmp_path / "run", as_model, rename={"": "model."}).train()
    assert before.losses + after.losses == whole.losses
    assert "parameter names" not in capsys.readouterr().err
    assert after.checkpointer.resume().changes == ()


class CountingAround(Around):
    """Its attribute belongs to no other class."""

    num_batches = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches += 1
        return super().forward(x)


def test_attributes_of_the_class_around_the_model_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Job(tmp_path / "whole", as_net).train()
    before = crashed(tmp_path / "run", lambda: CountingAround(model=make_net()))
    after = Job(tmp_path / "run", as_net).train()
    assert before.losses + after.losses == whole.losses
    lost = "not in this program, not restored: model.<checkpoint>.num_batches"
    assert capsys.readouterr().err.count(lost) == 1


def test_another_value_would_be_seen(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole", as_net).train()
    before = crashed(tmp_path / "run", as_net)
    after = Job(tmp_path / "run", as_model, exclude={"optimizer"}).train()
    assert before.losses + after.losses != whole.losses


def test_each_model_of_several_has_its_own_change(tmp_path: Path) -> None:
    def resumed(directory: str, *makes: Callable[[], nn.Module]) -> list[Any]:
        torch.manual_seed(0)
        models = dict(zip(("first", "second"), (make() for make in makes), strict=True))
        parameters = [p for model in models.values() for p in model.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        options: dict[str, Any] = {"model": models, "optimizer": optimizer}
        with Checkpointer(tmp_path / directory, **options) as checkpointer:
            checkpointer.resume()
            for _ in range(3):
                sum(model(torch.ones(4, 3)).sum() for model in models.values()).backward()
                optimizer.step()
                optimizer.zero_grad()
            checkpointer.save()
        return [p.tolist() for p in parameters]

    resumed("a", as_net, as_model)
    resumed("b", as_net, as_model)
    assert resumed("a", as_net, as_model) == resumed("b", as_peft, as_net)


def test_frozen_tensors_follow_out_of_their_own_file(tmp_path: Path) -> None:
    def make(*, is_wrapped: bool, is_changed: bool = False) -> tuple[nn.Module, Checkpointer]:
        torch.manual_seed(is_changed)
        net = nn.Sequential(nn.Linear(1100, 1000, bias=False), nn.Linear(1000, 2))
        net[0].requires_grad_(False)
        model = Around(model=net) if is_wrapped else net
        optimizer = torch.optim.SGD(net[1].parameters(), lr=0.1)
        return net, Checkpointer(tmp_path, model=model, optimizer=optimizer, keep_latest=3)

    saved, checkpointer = make(is_wrapped=True)
    with checkpointer:
        checkpointer.resume()
        checkpointer.save()
    for is_wrapped in (False, True):
        found, checkpointer = make(is_wrapped=is_wrapped, is_changed=True)
        with checkpointer:
            checkpointer.resume()
            checkpointer.save()
        values = zip(saved.parameters(), found.parameters(), strict=True)
        assert all(torch.equal(then, now) for then, now in values)
    assert len(list(tmp_path.glob("step-*/*/*.frozen.safetensors"))) == 1


# ---------------------------------------------------------------- a mapping


def two(first: str, second: str, **more: nn.Module) -> Callable[[], nn.Module]:
    """A model of two equal layers under these names."""
    return lambda: Around(**{first: nn.Linear(3, 3), second: nn.Linear(3, 3)}, **more)


def test_a_part_of_the_names_needs_the_mapping(tmp_path: Path) -> None:
    whole = Job(tmp_path / "whole", two("encoder", "head")).train()
    before = crashed(tmp_path / "run", two("encoder", "head"))
    remedy = r"pass rename=\{'encoder.': 'bert.'\}"
    with pytest.raises(StateMismatchError, match=remedy):
        Job(tmp_path / "run", two("bert", "head")).train()
    after = Job(tmp_path / "run", two("bert", "head"), rename={"encoder.": "bert."}).train()
    assert before.losses + after.losses == whole.losses
    assert after.state() == whole.state()


def test_the_longest_prefix_counts(tmp_path: Path) -> None:
    before = crashed(tmp_path, two("encoder", "head"))
    inner = {"inner": make_two("encoder")}
    after = Job(
        tmp_path,
        lambda: Around(**inner, head=nn.Linear(3, 3)),
        rename={"": "inner.", "head.": "head."},
    ).train()
    assert before.losses
    assert after.losses


def make_two(name: str) -> nn.Module:
    return Around(**{name: nn.Linear(3, 3)})


REFUSED: dict[str, tuple[Any, Any, dict[str, str], str]] = {
    "a head on one side": (
        two("a", "b"),
        lambda: Around(model=two("a", "b")(), head=nn.Linear(3, 3)),
        {},
        r"with \* -> model.\* most names are equal, but the checkpoint lacks head.bias",
    ),
    "a head that is missing": (
        lambda: Around(model=two("a", "b")(), head=nn.Linear(3, 3)),
        two("a", "b"),
        {},
        r"with model.\* -> \* most names are equal, but the run lacks head.bias",
    ),
    "another shape": (
        two("a", "b"),
        lambda: Around(model=Around(a=nn.Linear(3, 3), b=nn.Linear(3, 3, dtype=torch.float64))),
        {},
        r"model: model.b.weight: float32 \(3, 3\) in the checkpoint",
    ),
    "layers that only look alike": (two("a", "b"), two("b", "c"), {}, "a part of the parameters"),
    "two changes that are as good": (two("a", "b"), two("c", "d"), {}, "has no such parameter"),
    "a wrong prefix": (
        two("a", "b"),
        lambda: Around(model=two("a", "b")()),
        {"module.": ""},
        "nothing in the checkpoint becomes model.a.bias, model.a.weight, model.b.bias and 1 more; "
        "left over: a.bias",
    ),
    "two names become one": (two("a", "b"), two("x", "y"), {"a.": "x.", "b.": "x."}, "b.bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_match_by_name_is_refused(tmp_path: Path, case: str) -> None:
    first, then, rename, words = REFUSED[case]
    crashed(tmp_path, first)
    job = Job(tmp_path, then, rename=rename)
    before = job.state()
    with pytest.raises(StateMismatchError, match=words):
        job.train()
    assert job.state() == before


def test_swapped_layers_keep_their_names(tmp_path: Path) -> None:
    before = crashed(tmp_path / "run", two("a", "b"))
    after = Job(tmp_path / "run", lambda: Around(model=two("b", "a")()))
    after.checkpointer.resume()
    then, now = before.model.state_dict(), after.model.state_dict()
    # The optimizer had not stepped since the save.
    assert {f"model.{name}": value.tolist() for name, value in then.items()} == {
        name: value.tolist() for name, value in now.items()
    }


@pytest.mark.parametrize("rename", [{"model": ""}, {"model.": 1}, "model."])
def test_the_mapping_is_one_of_prefixes(tmp_path: Path, rename: Any) -> None:
    with pytest.raises(ConfigurationError, match="rename"):
        Job(tmp_path, as_net, rename=rename)


# ---------------------------------------------------------------- names alone

PARTS = st.sampled_from(["a", "b", "model"])
NAMES = st.sets(st.lists(PARTS, min_size=1, max_size=3).map(".".join), min_size=1, max_size=4)
PREFIXES = st.lists(PARTS, max_size=2).map(lambda parts: "".join(f"{part}." for part in parts))


@given(NAMES, PREFIXES, PREFIXES)
def test_each_change_of_one_prefix_is_found_as_the_same_names(
    names: set[str], then: str, now: str
) -> None:
    saved = {then + name for name in names}
    live = {now + name for name in names}
    found = common_prefix_change(saved, live)
    renamed = {name: name for name in saved} if found is None else found.names
    assert renamed == {then + name: now + name for name in names}


@given(NAMES, NAMES)
def test_only_names_that_correspond_are_found(saved: set[str], live: set[str]) -> None:
    found = common_prefix_change(saved, live)
    if found is not None:
        assert sorted(found.names.values()) == sorted(live)
        ((then, now),) = found.prefixes.items()
        assert all(new == now + old.removeprefix(then) for old, new in found.names.items())
