"""Samples of the weights in the journal: which elements have their turn, and what they prove."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from resumekit.adapters.torch import Checkpointer
from resumekit.record.comparison import verdicts
from resumekit.record.journal import Record
from resumekit.record.step_values import WeightSamples


def optimizer_of(*tensors: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(each) for each in tensors], lr=0.1)


def digests(optimizer: torch.optim.Optimizer, steps: range) -> list[int]:
    samples = WeightSamples([optimizer])
    return [record.ids for step in steps for record in samples.take(step)]


KINDS: dict[str, Any] = {
    "float32": lambda: torch.randn(7, 9),
    "bfloat16": lambda: torch.randn(7, 9).bfloat16(),
    "float64": lambda: torch.randn(300, dtype=torch.float64),
    "complex": lambda: torch.randn(9, dtype=torch.complex64),
    "a number": lambda: torch.randn(()),
    "transposed": lambda: torch.randn(7, 9).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a part of rows": lambda: torch.randn(7, 9)[:, 2:5],
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_each_element_has_its_turn(make: Any) -> None:
    optimizer = optimizer_of(torch.zeros(0), make(), torch.randn(200))
    tensors = optimizer.param_groups[0]["params"]
    before = digests(optimizer, range(12))
    assert before == digests(optimizer, range(12))
    for tensor in tensors[1:]:
        for index in range(tensor.numel()):
            position = np.unravel_index(index, tensor.shape)
            value = tensor.detach()[position].clone()
            with torch.no_grad():
                tensor[position] += 1
            assert digests(optimizer, range(12)) != before, (tensor.shape, position)
            with torch.no_grad():
                tensor[position] = value


def test_all_tensors_have_their_turn_within_as_many_steps() -> None:
    optimizer = optimizer_of(*(torch.randn(3) for _ in range(7)))
    before = digests(optimizer, range(20, 27))
    for tensor in optimizer.param_groups[0]["params"]:
        with torch.no_grad():
            tensor += 1
        assert digests(optimizer, range(20, 27)) != before
        before = digests(optimizer, range(20, 27))


def test_without_parameters_there_is_no_record() -> None:
    assert WeightSamples().take(3) == []
    assert WeightSamples([optimizer_of(torch.zeros(0))]).take(3) == []


def test_a_group_that_is_added_is_looked_at() -> None:
    optimizer = optimizer_of(torch.zeros(2))
    samples = WeightSamples([optimizer])
    first: list[Record] = samples.take(1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert [each.num_samples for each in (*first, *samples.take(1))] == [2, 4]


# ---------------------------------------------------------------- in a run


@pytest.fixture(autouse=True)
def _a_program_with_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)


class StopError(Exception):
    """Ends a launch without a save."""


def train(directory: Path, *, until: int, changed: bool = False) -> None:
    """Trains on numbers of its own, so that the journal sees no sample ids and no loss.

    Args:
        directory: of the run.
        until: the step after which the launch ends.
        changed: the weights are others after the resume.
    """
    torch.manual_seed(0)
    last = nn.Linear(5, 3)
    model = nn.Sequential(nn.Linear(6, 5), last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    checkpointer = Checkpointer(directory, model=model, optimizer=optimizer, save_every=4)
    try:
        with checkpointer:
            for inputs in checkpointer.batches([torch.randn(4, 6) for _ in range(9)], epochs=1):
                if changed:
                    last.bias.data[2] += 1e-6
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step()
                if checkpointer.progress.step == until:
                    raise StopError
    except StopError:
        pass


def verdict_of(directory: Path) -> str:
    *_, last = verdicts(directory / "journal")
    return str(last.verdict)


def test_other_weights_are_a_difference(tmp_path: Path) -> None:
    train(tmp_path, until=7)
    train(tmp_path, until=9, changed=True)
    assert "different (step 5: weights" in verdict_of(tmp_path)


def test_equal_weights_are_identical(tmp_path: Path) -> None:
    train(tmp_path, until=7)
    train(tmp_path, until=9)
    assert verdict_of(tmp_path) == "3 repeated steps: identical (sample ids not compared)"
