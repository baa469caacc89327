"""The remedies of errors, followed: each test raises the error, reads its remedy and does that."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Sampler, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.data import DistributedResumableSampler

if TYPE_CHECKING:
    from followed_remedies import Remedy

Parts = Callable[[], dict[str, Any]]
Loader = Callable[[], Any]


class CrashError(Exception):
    """Ends a launch as a crash does."""


def options_in(remedy: str) -> dict[str, Any]:
    """The options that a remedy names, with their values."""
    value = r"\{[^}]*\}|'[^']*'|\"[^\"]*\"|True|False|\d+"
    found = re.findall(rf"(?<![\w-])(\w+)=({value})", remedy)
    return {name: ast.literal_eval(text) for name, text in found}


# ---------------------------------------------------------------- one tiny training


class Net(nn.Module):
    """Draws random numbers in every step."""

    def __init__(self, *, outputs: int = 1, head: str = "head") -> None:
        super().__init__()
        self.add_module("body", nn.Linear(2, 2))
        self.add_module(head, nn.Linear(2, outputs))
        self.drop = nn.Dropout(0.5)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            batch = layer(batch)
        return batch.square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def plain(**settings: Any) -> dict[str, Any]:
    model = Net(**settings)
    return {"model": model, "optimizer": sgd(model)}


def data() -> TensorDataset:
    return TensorDataset(torch.arange(16.0).reshape(8, 2) / 16)


def shuffled(**settings: Any) -> Any:
    return DataLoader(data(), **{"batch_size": 2, "shuffle": True, **settings})


def train(
    directory: Path,
    parts: Parts = plain,
    loader: Loader = shuffled,
    *,
    leave_after: int | None = None,
    epochs: int = 2,
    name: str | None = None,
    **options: Any,
) -> list[float]:
    """The weights at the end; a launch that leaves is killed there."""
    torch.manual_seed(0)
    given = parts()
    models = given["model"]
    model = next(iter(models.values())) if isinstance(models, dict) else models
    optimizers = given["optimizer"]
    optimizer = next(iter(optimizers.values())) if isinstance(optimizers, dict) else optimizers
    options = {"save_every": 1, "transient": {"leave_after"}, **given, **options}
    with Checkpointer(directory, **options) as checkpointer:
        for (batch,) in checkpointer.batches(loader(), epochs=epochs, name=name):
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            if "lr_scheduler" in given:
                given["lr_scheduler"].step()
            if "ema" in given:
                given["ema"].update_parameters(model)
            checkpointer.step()
            if checkpointer.progress.step == leave_after:
                raise CrashError
    return [each.item() for tensor in model.parameters() for each in tensor.flatten()]


def interrupted(directory: Path, *, leave_after: int = 3, **settings: Any) -> None:
    with pytest.raises(CrashError):
        train(directory, leave_after=leave_after, **settings)


# ---------------------------------------------------------------- a change since the checkpoint


class Change(NamedTuple):
    """A setting that a resume refuses.

    Args:
        text: the remedy.
        then: the settings of the interrupted run.
        now: the changed ones.
        undo: whether the remedy is to change them back, which must resume exactly.
        option: whether it names an option, with which the changed run must train to its end.
    """

    text: str
    then: dict[str, Any]
    now: dict[str, Any]
    undo: bool = True
    option: bool = False


def with_ema() -> dict[str, Any]:
    given = plain()
    return {**given, "ema": AveragedModel(given["model"])}


def with_object_as_ema(kind: Callable[[nn.Module], Any]) -> Parts:
    def parts() -> dict[str, Any]:
        given = plain()
        return {**given, "ema": kind(given["model"])}

    return parts


class Average:
    """An average that is no module."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.total = model, 0.0

    def update_parameters(self, model: nn.Module) -> None:
        self.total += next(model.parameters()).sum().item()

    def state_dict(self) -> dict[str, float]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.total = state["total"]


class OtherAverage(Average):
    """Another class."""


def adam() -> dict[str, Any]:
    model = Net()
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}


def in_groups() -> dict[str, Any]:
    model = Net()
    groups = [{"params": [each]} for each in model.parameters()]
    return {"model": model, "optimizer": torch.optim.SGD(groups, 0.1, momentum=0.9)}


def named(name: str) -> Parts:
    """A model with a parameter of this name."""

    def parts() -> dict[str, Any]:
        model = Net()
        model.register_parameter(name, nn.Parameter(torch.ones(3)))
        return {"model": model, "optimizer": sgd(model)}

    return parts


def with_other_head_and_scale() -> dict[str, Any]:
    model = Net(head="tail")
    model.register_parameter("scale", nn.Parameter(torch.ones(5)))
    return {"model": model, "optimizer": sgd(model)}


def two_optimizers(kind: Any) -> Parts:
    def parts() -> dict[str, Any]:
        model, other = Net(), Net()
        optimizers = {"a": sgd(model), "b": kind(other.parameters(), lr=0.1)}
        return {"model": {"a": model, "b": other}, "optimizer": optimizers}

    return parts


def scheduled(kind: Any, *arguments: Any) -> Parts:
    def parts() -> dict[str, Any]:
        given = plain()
        return {**given, "lr_scheduler": kind(given["optimizer"], *arguments)}

    return parts


def with_generators(**generators: torch.Generator) -> Parts:
    return lambda: {**plain(), "generators": generators}


def with_extras(**extras: Any) -> Parts:
    return lambda: {**plain(), "extras": extras}


def with_scaler(kind: Any, key: str | None = None) -> Parts:
    return lambda: {**plain(), "grad_scaler": kind() if key is None else {key: kind()}}


class Scaler:
    """A scaler with one value."""

    def __init__(self) -> None:
        self.values = {"scale": 1.0}

    def state_dict(self) -> dict[str, float]:
        return self.values

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.values = dict(state)

    def is_enabled(self) -> bool:
        return True


class LargerScaler(Scaler):
    """One value more."""

    def __init__(self) -> None:
        super().__init__()
        self.values = {"scale": 1.0, "growth": 2.0}


def distributed(**settings: Any) -> Loader:
    def loader() -> Any:
        sampler = DistributedResumableSampler(data(), num_replicas=1, rank=0, **settings)
        return DataLoader(data(), batch_size=2, sampler=sampler)

    return loader


def loader_of(length: int) -> Loader:
    return lambda: DataLoader(TensorDataset(torch.zeros(length, 2)), batch_size=2)


class CustomOrder(Sampler[int]):
    """An order without a name."""

    def __iter__(self) -> Iterator[int]:
        return iter([3, 1, 0, 2, 7, 5, 4, 6])

    def __len__(self) -> int:
        return 8


def in_custom_order(batch_size: int = 2) -> Any:
    return DataLoader(data(), sampler=CustomOrder(), batch_size=batch_size)


BUILD_MODEL = "Build the model as it was when the checkpoint was written"
BUILD_OPTIMIZER = "Build the optimizer as it was when the checkpoint was written"
BUILD_SCHEDULER = "Build the scheduler as it was when the checkpoint was written"
BUILD_OBJECT = "Build the object as it was when the checkpoint was written"
SCHEDULERS = torch.optim.lr_scheduler

CHANGES = (
    Change(
        "Restore the former settings of the sampler",
        {"loader": distributed(drop_last=False)},
        {"loader": in_custom_order},
    ),
    Change("Restore it, or pass allow_changes={'horizon'}", {}, {"epochs": 3}, option=True),
    Change(
        "Restore it, or pass allow_changes={'horizon'}",
        {"parts": scheduled(SCHEDULERS.CosineAnnealingLR, 8)},
        {"parts": scheduled(SCHEDULERS.CosineAnnealingLR, 9)},
        option=True,
    ),
    Change(
        "Pass allow_missing={{}} to start it from its live state",
        {},
        {"parts": with_ema},
        undo=False,
        option=True,
    ),
    Change(
        "Give it to the Checkpointer, or pass exclude={{}} to leave it out",
        {"parts": with_ema},
        {},
        option=True,
    ),
    Change(BUILD_MODEL, {}, {"parts": lambda: plain(outputs=3)}),
    Change(BUILD_OPTIMIZER, {}, {"parts": in_groups}),
    Change("{}, or pass exclude={{}} to start it afresh", {}, {"parts": adam}, option=True),
    Change(
        "{}, or pass exclude={{}} to start it afresh",
        {"parts": two_optimizers(torch.optim.SGD)},
        {"parts": two_optimizers(torch.optim.Adam)},
        option=True,
    ),
    Change(
        BUILD_SCHEDULER,
        {"parts": scheduled(SCHEDULERS.StepLR, 2)},
        {"parts": scheduled(SCHEDULERS.ExponentialLR, 0.9)},
    ),
    Change(
        BUILD_OBJECT,
        {"parts": with_object_as_ema(Average)},
        {"parts": with_object_as_ema(OtherAverage)},
    ),
    Change(
        "Resume with the kind of object that wrote the checkpoint",
        {"parts": with_object_as_ema(Average)},
        {"parts": with_ema},
    ),
    Change(
        "Hand over the same generators under the same names as when the checkpoint was written",
        {"parts": with_generators(a=torch.Generator())},
        {"parts": with_generators(b=torch.Generator())},
    ),
    Change(
        'Give extras the same objects as before, or pass exclude={"extras"}',
        {"parts": with_extras(a=Average(nn.Linear(1, 1)))},
        {"parts": with_extras(a=1)},
        option=True,
    ),
    Change(
        "Pass exclude={{}} to start with a fresh scaler",
        {"parts": with_scaler(Scaler)},
        {"parts": with_scaler(LargerScaler)},
        undo=False,
        option=True,
    ),
    Change(
        "Pass exclude={{}} to start with a fresh scaler",
        {"parts": with_scaler(Scaler, "a")},
        {"parts": with_scaler(LargerScaler, "a")},
        undo=False,
        option=True,
    ),
    Change("Give {} its old name {} back", {"parts": named("scale")}, {"parts": named("scales")}),
    Change(
        "If they are the same layers, pass rename={}",
        {},
        {"parts": lambda: plain(head="tail")},
        option=True,
    ),
    Change(
        "Build the model with the parts that it had",
        {},
        {"parts": with_other_head_and_scale},
    ),
    Change(
        "Pass randomness={}, or start a new run in an empty directory",
        {},
        {"randomness": "keyed"},
        option=True,
    ),
    Change(
        "Pass randomness={}, or start a new run in an empty directory",
        {"randomness": "keyed"},
        {"randomness": "tape"},
        option=True,
    ),
    Change(
        "Give the loader its former name, or restart its epochs with exclude={'data'}",
        {"name": "a"},
        {"name": "b"},
        option=True,
    ),
    Change(
        "Restore shuffle={} until this epoch is over",
        {"loader": distributed(shuffle=True)},
        {"loader": distributed(shuffle=False)},
    ),
    Change(
        "Restore the seed of the sampler, {}, until this epoch is over",
        {"loader": distributed(seed=1)},
        {"loader": distributed(seed=2)},
    ),
    Change(
        "Restore the former settings of this loader, or pass allow_changes={{}}",
        {},
        {"loader": lambda: shuffled(batch_size=1)},
        option=True,
    ),
    Change(
        "Restore the former settings of this loader",
        {"loader": loader_of(8)},
        {"loader": loader_of(10)},
    ),
    Change(
        "Finish the epoch with it; between two epochs any loader may replace it",
        {},
        {"loader": lambda: [(torch.zeros(2, 2),)] * 4},
    ),
)


@pytest.mark.parametrize(
    "change",
    [pytest.param(each, marks=pytest.mark.remedy(each.text), id=each.text) for each in CHANGES],
)
def test_the_remedy_for_a_change_resumes_the_run(
    tmp_path: Path, remedy: Remedy, change: Change
) -> None:
    interrupted(tmp_path / "a", **change.then)
    text = remedy.of(train, tmp_path / "a", **change.now)
    if change.option:
        given = options_in(text)
        assert given, text
        train(copied(tmp_path / "a"), **{**change.now, **given})
    if change.undo:
        whole = train(tmp_path / "whole", **change.then)
        assert train(tmp_path / "a", **change.then) == whole


def copied(directory: Path) -> Path:
    return Path(shutil.copytree(directory, directory.with_name(f"copy of {directory.name}")))


# ---------------------------------------------------------------- other resumes


class Wrapper(nn.Module):
    """A model with a prefix before all names."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, batch: torch.Tensor) -> Any:
        return self.net(batch)


def wrapped() -> dict[str, Any]:
    model = Wrapper()
    return {"model": model, "optimizer": sgd(model)}


@pytest.mark.remedy("Change rename, or leave it out to have the prefix found")
def test_a_wrong_rename_is_left_out(tmp_path: Path, remedy: Remedy) -> None:
    interrupted(tmp_path)
    remedy.of(train, tmp_path, wrapped, rename={"": "nett."})
    copy = copied(tmp_path)
    assert train(tmp_path, wrapped) == train(copy, wrapped, rename={"": "net."})


def on_meta(*, has_memory: bool) -> Parts:
    def parts() -> dict[str, Any]:
        with torch.device("meta"):
            model = Net()
        if has_memory:
            model.to_empty(device="cpu")
        return {"model": model, "optimizer": sgd(model)}

    return parts


@pytest.mark.remedy("Call model.to_empty(device=...) before resuming")
def test_a_model_on_the_meta_device_gets_memory(tmp_path: Path, remedy: Remedy) -> None:
    whole = train(tmp_path / "whole")
    interrupted(tmp_path / "a")
    remedy.of(train, tmp_path / "a", on_meta(has_memory=False))
    assert train(tmp_path / "a", on_meta(has_memory=True)) == whole


class Meter:
    """A sum that is stored under a name.

    Args:
        name: of the sum, in the state.
    """

    def __init__(self, name: str) -> None:
        self.name, self.value = name, 0.0

    def state_dict(self) -> dict[str, float]:
        return {self.name: self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state[self.name]


@pytest.mark.remedy("Give it a load_state_dict for this state, or pass exclude={{}}")
def test_an_object_that_refuses_its_state_is_left_out(tmp_path: Path, remedy: Remedy) -> None:
    interrupted(tmp_path, extras={"meter": Meter("sum")})
    text = remedy.of(train, tmp_path, extras={"meter": Meter("total")})
    assert train(tmp_path, extras={"meter": Meter("total")}, **options_in(text))


@pytest.mark.remedy("Pass randomness='tape'")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_pipe_is_not_keyed(tmp_path: Path, remedy: Remedy) -> None:
    from torch.utils.data.datapipes.map import SequenceWrapper

    def loader() -> Any:
        return DataLoader(SequenceWrapper([(each,) for each in torch.ones(8, 2)]), batch_size=2)

    text = remedy.of(train, tmp_path / "a", loader=loader, randomness="keyed")
    train(tmp_path / "b", loader=loader, **options_in(text))
