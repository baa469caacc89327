"""The remedies for state that cannot be saved or restored as it is, followed."""

from __future__ import annotations

import ast
import multiprocessing
import random
import re
import secrets
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensor_classes import Rows
from torch import nn
from torch.utils.data import DataLoader, Sampler

from resumekit import ResumekitError
from resumekit.adapters.torch import Checkpointer

if TYPE_CHECKING:
    from followed_remedies import Remedy

NUM_BATCHES = 4
MANY_SAMPLES = 2**20  # no two draws from them agree by chance
Body = Callable[[nn.Module, int], object]


def do_nothing(model: nn.Module, step: int) -> None:
    """A loop's body."""


def numbers(sampler: Sampler[int] | None = None) -> DataLoader[Any]:
    """So many batches of two, of all samples or of those that a sampler draws."""
    dataset: Any = range(MANY_SAMPLES if sampler else 2 * NUM_BATCHES)
    return DataLoader(dataset, batch_size=2, sampler=sampler)


class Net(nn.Module):
    """Uses one of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


def launch(
    directory: Path,
    body: Body = do_nothing,
    *,
    before: Body = do_nothing,
    crashes_after: int = NUM_BATCHES,
    sampler: Sampler[int] | None = None,
    **options: Any,
) -> int:
    """Trains and gives the number of steps, or crashes."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = numbers(sampler)
    given = {"model": model, "optimizer": optimizer, "save_every": 1, **options}
    with Checkpointer(directory, **given) as checkpointer:
        before(model, 0)
        for batch in checkpointer.batches(loader, epochs=1):
            model(batch.float()[:, None]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            body(model, checkpointer.progress.step)
            checkpointer.step()
            if checkpointer.progress.step == crashes_after < NUM_BATCHES:
                raise ZeroDivisionError
        return checkpointer.progress.step


def crash(directory: Path, body: Body = do_nothing, **options: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        launch(directory, body, crashes_after=2, **options)


def resumes(directory: Path, body: Body = do_nothing, **options: Any) -> bool:
    """Whether a launch that crashes is continued to its end."""
    crash(directory, body, **options)
    return launch(directory, body, **options) == NUM_BATCHES


def transient_in(text: str) -> set[str]:
    return set(ast.literal_eval(re.findall(r"transient=(\{.*?\})", text)[0]))


# ---------------------------------------------------------------- parts that training adds


def add(part: nn.Module | torch.Tensor) -> Body:
    def body(model: nn.Module, step: int) -> None:
        if hasattr(model, "new"):
            return
        if isinstance(part, nn.Module):
            model.new = part
        else:
            model.register_buffer("new", part)

    return body


@pytest.mark.remedy("do that before the first batch")
@pytest.mark.parametrize("part", [nn.Linear(1, 1), torch.zeros(1)], ids=["module", "buffer"])
def test_a_part_is_added_before_the_first_batch(
    tmp_path: Path, remedy: Remedy, part: nn.Module | torch.Tensor
) -> None:
    body = add(part)
    remedy.in_text(error_of(launch, tmp_path / "a", body, strict=True))
    assert resumes(tmp_path / "b", before=body, strict=True)


@pytest.mark.remedy('do that before the first batch, or pass transient={"{}"}')
def test_a_module_without_state_may_be_transient(tmp_path: Path, remedy: Remedy) -> None:
    body = add(nn.Identity())
    text = remedy.in_text(error_of(launch, tmp_path / "a", body, strict=True))
    assert resumes(tmp_path / "b", before=body, strict=True)
    assert resumes(tmp_path / "c", body, strict=True, transient=transient_in(text))


def error_of(call: Callable[..., object], *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(ResumekitError) as error:
        call(*arguments, **keywords)
    return str(error.value)


# ---------------------------------------------------------------- values


def with_an_iterator(directory: Path, **options: Any) -> int:
    """Counts by an iterator, which says nothing of its position."""
    counts = iter({"a": 1, "b": 2, "c": 3, "d": 4}.values())
    return launch(directory, lambda model, step: next(counts), **options)


@pytest.mark.remedy('pass transient={"{}"}')
def test_a_value_that_cannot_be_saved_is_transient(tmp_path: Path, remedy: Remedy) -> None:
    text = remedy.in_text(error_of(with_an_iterator, tmp_path / "a", strict=True))
    options = {"strict": True, "transient": transient_in(text)}
    with pytest.raises(ZeroDivisionError):
        with_an_iterator(tmp_path / "b", crashes_after=2, **options)
    assert with_an_iterator(tmp_path / "b", **options) == NUM_BATCHES


class Holder:
    """A value as state of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@pytest.mark.full  # it takes seconds to reach the limit
@pytest.mark.remedy("Store long lists as arrays")
def test_a_long_list_is_stored_as_an_array(tmp_path: Path, remedy: Remedy) -> None:
    rows = [[0.1]] * 1_600_000
    remedy.of(launch, tmp_path / "a", extras={"rows": Holder(rows)})
    assert resumes(tmp_path / "b", extras={"rows": Holder(np.array(rows))})


def count(model: Any, step: int) -> None:
    """Counts in memory that processes may share."""
    if not hasattr(model, "counter"):
        model.counter = multiprocessing.Value("i", 0)
    model.counter.value += 1


@pytest.mark.remedy("Create it in __init__ or before the first step")
def test_shared_memory_is_created_before_the_first_step(tmp_path: Path, remedy: Remedy) -> None:
    for name in "ab":
        crash(tmp_path / name, count, before=count)
    remedy.of(launch, tmp_path / "a", count)
    assert launch(tmp_path / "b", count, before=count) == NUM_BATCHES


class OnceLoaded(Holder):
    """Takes a state once."""

    has_loaded = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.has_loaded:
            super().load_state_dict(state)
            self.has_loaded = True


@pytest.mark.remedy("Change it before the loop")
def test_what_loads_once_is_changed_before_the_loop(tmp_path: Path, remedy: Remedy) -> None:
    def run(directory: Path, *, is_in_the_loop: bool, crashes_after: int = NUM_BATCHES) -> int:
        once, model = OnceLoaded(0), Net()
        checkpointer = Checkpointer(
            directory, model=model, extras={"once": once}, save_every=1, strict=True
        )
        with checkpointer:
            once.value += not is_in_the_loop
            for _ in checkpointer.epochs(1):
                once.value += is_in_the_loop
                for _ in checkpointer.batches(numbers()):
                    checkpointer.step()
                    if checkpointer.progress.step == crashes_after < NUM_BATCHES:
                        raise ZeroDivisionError
            return checkpointer.progress.step

    for name, is_in_the_loop in (("a", True), ("b", False)):
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / name, is_in_the_loop=is_in_the_loop, crashes_after=2)
    remedy.of(run, tmp_path / "a", is_in_the_loop=True)
    assert run(tmp_path / "b", is_in_the_loop=False) == NUM_BATCHES


# ---------------------------------------------------------------- samplers


class Drawing(Sampler[int]):
    """Random indices, the next ones from where training sets them.

    Args:
        draw: gives the random numbers, by the generator.
        is_lazy: whether each index is drawn when it is asked for.
    """

    def __init__(self, draw: Callable[[random.Random], int], *, is_lazy: bool) -> None:
        self.generator, self.draw, self.is_lazy = random.Random(0), draw, is_lazy
        self.first = 0

    def __len__(self) -> int:
        return 2 * NUM_BATCHES

    def __iter__(self) -> Iterator[int]:
        indices = (self.draw(self.generator) + self.first for _ in range(len(self)))
        return indices if self.is_lazy else iter([*indices])


def unrepeatable(generator: random.Random) -> int:
    """A number that no program draws twice."""
    return secrets.randbelow(MANY_SAMPLES // 2)


def repeatable(generator: random.Random) -> int:
    return generator.randrange(MANY_SAMPLES // 2)


def launch_with(directory: Path, sampler: Drawing, *, moves: bool = False, **options: Any) -> int:
    def move(model: nn.Module, step: int) -> None:
        sampler.first += moves

    return launch(directory, move, sampler=sampler, **options)


def resumes_with(directory: Path, make: Callable[[], Drawing], **options: Any) -> bool:
    given = {"strict": True, **options}
    with pytest.raises(ZeroDivisionError):
        launch_with(directory, make(), crashes_after=3, **given)
    return launch_with(directory, make(), **given) == NUM_BATCHES


@pytest.mark.remedy("let __iter__ return iter() of a list, which is saved")
def test_an_order_that_is_drawn_at_once_is_saved(tmp_path: Path, remedy: Remedy) -> None:
    lazy = Drawing(repeatable, is_lazy=True)
    remedy.in_text(error_of(launch_with, tmp_path / "a", lazy, moves=True, strict=True))
    at_once = partial(Drawing, repeatable, is_lazy=False)
    assert resumes_with(tmp_path / "b", at_once, moves=True)


@pytest.mark.remedy("draw it from a generator that is an attribute of the sampler")
def test_numbers_that_differ_are_drawn_from_a_generator(tmp_path: Path, remedy: Remedy) -> None:
    sampler = Drawing(unrepeatable, is_lazy=False)
    remedy.in_text(error_of(launch_with, tmp_path / "a", sampler, strict=True))
    assert resumes_with(tmp_path / "b", partial(Drawing, repeatable, is_lazy=False))


@pytest.mark.remedy(
    "Draw the whole order when the epoch begins, or from a generator that is an attribute of the "
    "sampler"
)
@pytest.mark.parametrize("moves", [True, False], ids=["at once", "from a generator"])
def test_another_order_is_drawn_at_once_or_from_a_generator(
    tmp_path: Path, remedy: Remedy, moves: bool
) -> None:
    make = partial(Drawing, repeatable if moves else unrepeatable, is_lazy=True)
    remedy.of(resumes_with, tmp_path / "a", make, moves=moves, strict=False)
    make = partial(Drawing, repeatable, is_lazy=not moves)
    assert resumes_with(tmp_path / "b", make, moves=moves)


# ---------------------------------------------------------------- tensors made of others


class Unlisted(Rows):
    """Of no library that adds its classes."""


@pytest.mark.remedy(
    "Import it before the resume, and add it with torch.serialization.add_safe_globals if its "
    "library does not"
)
def test_a_class_that_no_live_tensor_has_is_added_to_the_safe_globals(
    tmp_path: Path, remedy: Remedy
) -> None:
    def checkpointer(**extras: Any) -> Checkpointer:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return Checkpointer(tmp_path, model=model, optimizer=optimizer, extras=extras)

    moment = Unlisted.of(torch.randn(3, 2))
    with checkpointer(moment=moment) as first:
        first.save()
    with checkpointer() as second:
        remedy.of(second.resume)
    known = torch.serialization.get_safe_globals()
    try:
        torch.serialization.add_safe_globals([Unlisted])
        with checkpointer() as third:
            third.resume()
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(known)


class Kind(Enum):
    SIGNED = "signed"


class Labelled(Rows):
    """Has an enum in its context, which would be read as its value."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names, context = super().__tensor_flatten__()
        return names, {**context, "kind": Kind.SIGNED}


@pytest.mark.remedy("Store a plain tensor")
def test_a_tensor_with_an_enum_in_its_context_is_stored_as_a_plain_one(
    tmp_path: Path, remedy: Remedy
) -> None:
    labelled = Labelled.of(torch.randn(3, 2))
    extras: dict[str, Any] = {"values": labelled}
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Checkpointer(tmp_path, model=model, optimizer=optimizer, extras=extras) as checkpointer:
        remedy.of(checkpointer.save)
        extras["values"] = labelled.dequantize()
        checkpointer.save()
