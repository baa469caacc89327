"""The remedies for state that cannot be saved or restored as it is, followed."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from resumekit import ResumekitError
from resumekit.adapters.torch import Checkpointer

if TYPE_CHECKING:
    from followed_remedies import Remedy

NUM_BATCHES = 4
Body = Callable[[nn.Module, int], object]


def do_nothing(model: nn.Module, step: int) -> None:
    """A loop's body."""


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
    **options: Any,
) -> int:
    """Trains and gives the number of steps, or crashes."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    numbers: Any = range(2 * NUM_BATCHES)
    loader = DataLoader(numbers, batch_size=2)
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
