"""Loops of other forms, written as the quickstart says: ended anywhere, they continue exactly.

An exception ends a launch, and the next one begins with other weights. What training did is
written to a file, which no checkpoint holds.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from resumekit.adapters.torch import Checkpointer

CRASH = "OTHER_FORMS_CRASH_AFTER"
Train = Callable[..., Any]


class CrashError(Exception):
    """Stands for whatever ends a process."""


def note(directory: Path, *values: Any) -> None:
    """Writes what training did; crashes after as many lines as the test asks for."""
    texts = (str(each.tolist() if isinstance(each, torch.Tensor) else each) for each in values)
    path = Path(f"{directory}.txt")
    with path.open("a", encoding="utf-8") as file:
        file.write(" ".join(texts) + "\n")
    if str(len(path.read_text(encoding="utf-8").splitlines())) == os.environ.get(CRASH):
        raise CrashError


def descend(model: nn.Linear, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - x.sum(-1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def data(length: int = 12, *, shuffle: bool = True) -> DataLoader[Any]:
    inputs = torch.linspace(-1, 1, length * 3).reshape(length, 3)
    return DataLoader(inputs, batch_size=2, shuffle=shuffle)  # type: ignore[arg-type]


def ppo(directory: Path, **options: Any) -> None:
    """Every seventh step of an environment trains four times on what was collected."""
    policy = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    old, buffer, state = copy.deepcopy(policy), list[torch.Tensor](), torch.zeros(3)
    with Checkpointer(directory, model=policy, optimizer=optimizer, **options) as ckpt:
        for t in ckpt.batches(range(40), epochs=1):
            with torch.no_grad():
                state = (0.9 * state + old(state) + torch.randn(3)).clone()
            buffer.append(state)
            note(directory, t, state)
            if (t + 1) % 7 == 0:
                for number in range(4):
                    loss = descend(policy, torch.stack(buffer), optimizer)
                    ckpt.step(loss=loss)
                    note(directory, t, number, loss, policy.weight)
                old.load_state_dict(policy.state_dict())
                buffer.clear()


def train_and_validation(directory: Path, **options: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loaders = {"train": data(), "valid": data(4, shuffle=False)}
    with Checkpointer(directory, model=model, optimizer=optimizer, **options) as ckpt:
        for epoch in ckpt.epochs(3):
            for split in loaders:
                losses = []
                for x in ckpt.batches(loaders[split]) if split == "train" else loaders[split]:
                    if split == "train":
                        loss = descend(model, x, optimizer)
                        ckpt.step(loss=loss)
                    else:
                        loss = model(x).square().mean()
                    losses.append(loss.item())
                    note(directory, epoch, split, losses)
                note(directory, epoch, split, "mean", sum(losses) / len(losses))


def new_optimizer_at_an_epoch(directory: Path, **options: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = data()
    with Checkpointer(directory, model=model, optimizer=optimizer, **options) as ckpt:
        for epoch in ckpt.epochs(3):
            new = torch.optim.Adam(model.parameters(), lr=0.05 / (1 + epoch))
            optimizer.load_state_dict(new.state_dict())
            for x in ckpt.batches(loader):
                loss = descend(model, x, optimizer)
                ckpt.step(loss=loss)
                note(directory, epoch, loss, model.weight)


def new_optimizer_at_a_step(directory: Path, **options: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loader = data()
    with Checkpointer(directory, model=model, optimizer=optimizer, **options) as ckpt:
        for number, x in enumerate(ckpt.batches(loader, epochs=3)):
            if number % 7 == 4:
                new = torch.optim.Adam(model.parameters(), lr=0.05 / number)
                optimizer.load_state_dict(new.state_dict())
            loss = descend(model, x, optimizer)
            ckpt.step(loss=loss)
            note(directory, number, loss, model.weight)


LOOPS = [ppo, train_and_validation, new_optimizer_at_an_epoch, new_optimizer_at_a_step]


def launch(
    train: Train, directory: Path, *, seed: int = 0, crash_after: int | None = None, **options: Any
) -> list[str]:
    """One process of a run; gives what this launch and those before it wrote."""
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch, suppress(CrashError):
        if crash_after is not None:
            patch.setenv(CRASH, str(crash_after))
        train(directory, save_every=3, **options)
    return Path(f"{directory}.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_of_another_form_continues_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loop: Train
) -> None:
    whole = launch(loop, tmp_path / "whole", strict=True)
    assert len({*whole}) == len(whole)
    for crash_after in (len(whole) // 2 - 1, len(whole) // 2, len(whole) * 2 // 3, len(whole) - 2):
        directory = tmp_path / str(crash_after)
        killed = launch(loop, directory, strict=True, crash_after=crash_after)
        assert killed == whole[:crash_after]
        again = launch(loop, directory, strict=True, seed=5)[crash_after:]
        assert 2 <= len(again) < len(whole)
        assert again == whole[-len(again) :]
    assert not [each.message for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("left_out", ["model", "optimizer"])
def test_without_the_model_or_the_optimizer_it_differs(
    tmp_path: Path, loop: Train, left_out: str
) -> None:
    whole = launch(loop, tmp_path / "whole")
    crash_after = len(whole) * 2 // 3
    launch(loop, tmp_path / "run", crash_after=crash_after)
    again = launch(loop, tmp_path / "run", seed=5, exclude={left_out})[crash_after:]
    assert again != whole[-len(again) :]
