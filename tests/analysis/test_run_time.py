"""What a run reports of the loop that it is in: names, objects, and nothing kept alive."""

from __future__ import annotations

import copy
import gc
import importlib
import logging
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.errors import InexactError

LOSS = nn.functional.cross_entropy


class Parts:
    """The parts of a small run."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
        self.loader = DataLoader(data, batch_size=2)
        self.ckpt = Checkpointer(
            directory, model=self.model, optimizer=self.optimizer, save_every=3, **options
        )

    def update(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.ckpt.step(loss=loss)

    def lines(self) -> list[str]:
        """The lines of the last capture report that are not exact."""
        return [str(line) for line in self.ckpt._run.reporter.capture_report().inexact]


def no_state_of_its_own(parts: Parts) -> None:
    running, losses = 0.0, []
    for inputs, labels in parts.ckpt.batches(parts.loader, epochs=1):
        loss = LOSS(parts.model(inputs), labels)
        parts.update(loss)
        running += loss.item()
        losses.append(loss.item())
    logging.info("%s %s", running, losses)


def carries_a_hidden_state(parts: Parts) -> None:
    hidden, best = torch.zeros(2), 1e9
    for inputs, labels in parts.ckpt.batches(parts.loader, epochs=1):
        out = parts.model(inputs) + hidden
        hidden = out.detach().mean(0)
        loss = LOSS(out, labels)
        parts.update(loss)
        if loss.item() < best:
            best = loss.item()
            parts.ckpt.save()


def fills_a_buffer(parts: Parts) -> None:
    buffer: list[torch.Tensor] = []
    unused: list[int] = []
    for inputs, labels in parts.ckpt.batches(parts.loader, epochs=1):
        buffer.append(inputs)
        if len(unused) > 3:
            unused.append(1)
            break
        parts.update(LOSS(parts.model(torch.stack(buffer).mean(0)), labels))


def decides_by_a_relative_index(parts: Parts) -> None:
    for i, (inputs, labels) in enumerate(parts.ckpt.batches(parts.loader, epochs=1)):
        loss = LOSS(parts.model(inputs), labels)
        loss.backward()
        if i % 2 == 1:
            parts.optimizer.step()
            parts.optimizer.zero_grad()
        parts.ckpt.step()


def decides_by_an_absolute_index(parts: Parts) -> None:
    batches = parts.ckpt.batches(parts.loader, epochs=1)
    for i, (inputs, labels) in enumerate(batches, start=batches.initial):
        loss = LOSS(parts.model(inputs), labels)
        loss.backward()
        if i % 2 == 1:
            parts.optimizer.step()
            parts.optimizer.zero_grad()
        parts.ckpt.step()


@pytest.fixture(autouse=True)
def _messages(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "resumekit"):
        yield


def test_a_loop_without_state_of_its_own_starts_under_strict(tmp_path: Path) -> None:
    parts = Parts(tmp_path, strict=True)
    no_state_of_its_own(parts)
    assert parts.lines() == []


def test_names_are_reported_with_their_line_and_what_to_do(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    carries_a_hidden_state(parts)
    line = carries_a_hidden_state.__code__.co_firstlineno + 2
    assert parts.lines() == [
        f"test_run_time.py:{line}: not in the checkpoint: best, hidden. "
        'Keep them in extras["best"], or list them in transient={...}.'
    ]


def test_strict_refuses_names_before_the_first_step(tmp_path: Path) -> None:
    parts = Parts(tmp_path, strict=True)
    with pytest.raises(InexactError, match="not in the checkpoint: best, hidden"):
        carries_a_hidden_state(parts)
    assert parts.ckpt.progress.step == 0


def test_strict_refuses_an_object_when_it_has_changed(tmp_path: Path) -> None:
    parts = Parts(tmp_path, strict=True)
    with pytest.raises(InexactError, match="buffer: not in the checkpoint"):
        fills_a_buffer(parts)
    assert parts.ckpt.progress.step == 1


def test_strict_accepts_names_that_are_listed_as_transient(tmp_path: Path) -> None:
    carries_a_hidden_state(Parts(tmp_path, strict=True, transient={"best", "hidden"}))


def test_transient_silences_a_name(tmp_path: Path) -> None:
    parts = Parts(tmp_path, transient={"best"})
    carries_a_hidden_state(parts)
    assert "not in the checkpoint: hidden. Keep it" in parts.lines()[0]


def test_an_object_is_reported_once_its_content_has_changed(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    fills_a_buffer(parts)
    assert [line.split(": ")[0].rpartition(" ")[2] for line in parts.lines()] == ["buffer"]


def test_a_relative_index_is_reported_and_an_absolute_one_is_not(tmp_path: Path) -> None:
    relative, absolute = Parts(tmp_path / "a"), Parts(tmp_path / "b")
    decides_by_a_relative_index(relative)
    decides_by_an_absolute_index(absolute)
    assert "enumerate(batches, start=batches.initial)" in relative.lines()[0]
    assert absolute.lines() == []


def test_the_absolute_index_continues_inside_an_epoch(tmp_path: Path) -> None:
    def indices(directory: Path, stop: int | None) -> list[tuple[int, int]]:
        parts, seen = Parts(directory), []
        try:
            for epoch in parts.ckpt.epochs(2):
                batches = parts.ckpt.batches(parts.loader)
                for i, (inputs, labels) in enumerate(batches, start=batches.initial):
                    seen.append((epoch, i))
                    if len(seen) == stop:
                        raise KeyboardInterrupt
                    parts.update(LOSS(parts.model(inputs), labels))
            parts.ckpt.close()
        except KeyboardInterrupt:
            parts.ckpt.__exit__(KeyboardInterrupt, None, None)
        return seen

    whole = indices(tmp_path / "whole", None)
    first = indices(tmp_path / "run", 6)
    assert whole == [(epoch, i) for epoch in range(2) for i in range(4)]
    assert first[:3] + indices(tmp_path / "run", None) == whole


def test_a_value_of_extras_that_the_loop_leaves_stale_is_reported(tmp_path: Path) -> None:
    extras: dict[str, Any] = {"seen": 0}
    parts = Parts(tmp_path, extras=extras)
    seen = extras["seen"]
    for inputs, labels in parts.ckpt.batches(parts.loader, epochs=1):
        seen += 1
        parts.update(LOSS(parts.model(inputs), labels) * seen)
    assert parts.lines() == [
        'extras/seen: a copy of seen from before the loop. Write extras["seen"] = seen in the loop.'
    ]


def test_a_value_that_the_loop_keeps_in_extras_is_not_reported(tmp_path: Path) -> None:
    extras: dict[str, Any] = {}
    parts = Parts(tmp_path, extras=extras)
    parts.ckpt.resume()
    seen = extras.get("seen", 0)
    for inputs, labels in parts.ckpt.batches(parts.loader, epochs=1):
        seen += 1
        extras["seen"] = seen
        parts.update(LOSS(parts.model(inputs), labels) * seen)
    assert parts.lines() == []


def test_a_loop_without_a_source_is_unknown_and_a_hint(tmp_path: Path) -> None:
    parts = Parts(tmp_path, strict=True)
    source = (
        "for x, y in parts.ckpt.batches(parts.loader, epochs=1):\n"
        "    parts.update(LOSS(parts.model(x), y))\n"
    )
    names = {"parts": parts, "LOSS": LOSS, "__name__": "typed"}
    run = compile(source, "<typed>", "exec")
    FunctionType(run, names)()
    assert "the source of the loop cannot be read" in parts.lines()[0]


def test_a_source_that_the_analysis_fails_on_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = " + ".join(["1"] * 900)
    source = (
        "def train(parts, loss):\n"
        "    num_batches = 0\n"
        "    for x, y in parts.ckpt.batches(parts.loader, epochs=1):\n"
        f"        weight = {sums}\n"
        "        parts.update(loss(parts.model(x), y) * weight)\n"
        "        num_batches += 1\n"
        "    return num_batches\n"
    )
    (tmp_path / "deep.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    parts = Parts(tmp_path / "run", strict=True)
    assert importlib.import_module("deep").train(parts, LOSS) == 4
    assert "the analysis of the loop failed" in parts.lines()[0]


ASKED = """
class Rescale:
    def __init__(self, model, keeps):
        self.model, self.keeps, self.largest = model, keeps, 0.0

    def __call__(self, values):
        if self.keeps:
            self.largest = max(self.largest, float(values.abs().max()))
        return values / (1.0 + self.largest)
"""


@pytest.mark.parametrize("keeps", [True, False])
def test_an_object_of_another_file_is_reported_when_being_asked_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    (tmp_path / "asked.py").write_text(ASKED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    parts = Parts(tmp_path / "run")
    rescale = importlib.import_module("asked").Rescale(parts.model, keeps)
    for inputs, labels in parts.ckpt.batches(parts.loader, epochs=1):
        parts.update(LOSS(parts.model(rescale(inputs)), labels))
    found = [line for line in parts.lines() if "rescale" in line]
    assert len(found) == keeps


def test_a_tensor_that_a_given_optimizer_trains_is_not_reported(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    scale = torch.ones(1, requires_grad=True)
    untrained = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([scale], lr=0.1)
    other = torch.optim.SGD([untrained], lr=0.1)
    ckpt = Checkpointer(
        tmp_path / "both",
        model=parts.model,
        optimizer={"model": parts.optimizer, "scale": optimizer},
        save_every=3,
    )
    parts.ckpt.close()
    parts.ckpt = ckpt
    for inputs, labels in parts.ckpt.batches(parts.loader, epochs=1):
        loss = LOSS(parts.model(inputs) * scale * untrained, labels)
        optimizer.zero_grad()
        other.zero_grad()
        parts.update(loss)
        optimizer.step()
        other.step()
    named = " ".join(parts.lines())
    assert "untrained" in named
    assert "scale" not in named


def test_a_comprehension_belongs_to_the_function_that_has_it(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    scheduler = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1)

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> Any:
        parts.update(LOSS(parts.model(inputs), labels))
        scheduler.step()

    _ = [step(*batch) for batch in parts.ckpt.batches(parts.loader, epochs=1)]
    (line,) = parts.lines()
    assert line.startswith("lr_scheduler/scheduler: lost")


# ---------------------------------------------------------------- objects that were not given


def train(parts: Parts, **others: Any) -> None:
    scheduler, second = others.get("scheduler"), others.get("second")
    norm, teacher = others.get("norm"), others.get("teacher")
    second_optimizer, criterion = others.get("second_optimizer"), others.get("criterion", LOSS)
    for inputs, labels in parts.ckpt.batches(parts.loader, epochs=1):
        inputs = inputs if norm is None else norm(inputs)
        out = parts.model(inputs)
        if teacher is not None:
            with torch.no_grad():
                target = teacher(inputs)
            out = out + target
        if second is not None:
            out = out + second(inputs)
        parts.update(criterion(out, labels))
        if second_optimizer is not None:
            second_optimizer.step()
        if scheduler is not None:
            scheduler.step()


def test_a_scheduler_of_the_optimizer_is_refused(tmp_path: Path) -> None:
    parts = Parts(tmp_path, strict=True)
    scheduler = torch.optim.lr_scheduler.StepLR(parts.optimizer, 1)
    with pytest.raises(InexactError, match=r"lr_scheduler/scheduler.*pass lr_scheduler=scheduler"):
        train(parts, scheduler=scheduler)


def test_a_second_model_and_its_optimizer_are_refused(tmp_path: Path) -> None:
    parts = Parts(tmp_path, strict=True)
    second = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.1)
    with pytest.raises(InexactError, match="optimizer/second_optimizer"):
        train(parts, second=second, second_optimizer=optimizer)


def test_a_norm_outside_the_model_is_reported_after_the_first_step(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    train(parts, norm=nn.BatchNorm1d(3))
    assert [line.split(":")[0] for line in parts.lines()] == ["model/norm"]


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_teacher_that_does_not_change_is_not_reported(tmp_path: Path, is_frozen: bool) -> None:
    parts = Parts(tmp_path, strict=True)
    teacher = copy.deepcopy(parts.model).eval().requires_grad_(not is_frozen)
    train(parts, teacher=teacher, criterion=nn.CrossEntropyLoss(weight=torch.ones(2)))
    assert parts.lines() == []


def test_a_part_of_the_model_is_not_reported(tmp_path: Path) -> None:
    parts = Parts(tmp_path, strict=True)
    layer = parts.model
    train(parts)
    assert layer is parts.model
    assert parts.lines() == []


# ---------------------------------------------------------------- nothing is kept alive


class Activation:
    """Stands for a large value of the script."""


def test_no_value_of_a_local_lives_longer_than_without_resumekit(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    value: Any = Activation()
    holder: Any = [value]
    before, element = weakref.ref(value), weakref.ref(holder[0])
    for n, (inputs, labels) in enumerate(parts.ckpt.batches(parts.loader, epochs=1)):
        if n == 0:
            value = holder = None
            gc.collect()
            assert before() is None
            assert element() is None
        out = parts.model(inputs)
        last = weakref.ref(out)
        parts.update(LOSS(out, labels))
        del out
        assert last() is None
