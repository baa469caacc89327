"""Follows several remedies in the same launches, each in trainings of its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from followed_remedies import Remedy
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import resumekit
from resumekit import SharingPattern, StateComponent
from resumekit.testing import Cell, Kit, Run

NUM_STEPS = 4

Case = Callable[..., None]


class Cases(dict[str, Case]):
    """Functions that follow a remedy on every rank, by its text."""

    def follows(self, text: str) -> Callable[[Case], Case]:
        """Adds the decorated function.

        It gets a directory and the remedy and, where there are several launches, their number.
        """

        def add(case: Case) -> Case:
            self[text] = case
            return case

        return add

    def run(self, directory: Path, **arguments: int) -> None:
        """Calls them in their order; notes each that does not fail. Collective."""
        for text, case in self.items():
            folder = _folder(directory, text)
            case(folder / "runs", Remedy(text), **arguments)
            _barrier()
            folder.joinpath(_note(**arguments)).touch()

    def failures(
        self, kit: Kit, function: Callable[..., None], world_sizes: Sequence[int] = (2,)
    ) -> dict[str, str]:
        """Why a remedy was not followed, by its text; empty where it was.

        Args:
            kit: launches the function.
            function: calls ``run``; with several launches it takes their ``number``.
            world_sizes: of the launches; none is made after one that failed.
        """
        run, notes = kit.new_run(Cell(function)), set[str]()
        for number, world_size in enumerate(world_sizes):
            given = {"number": number} if len(world_sizes) > 1 else {}
            notes |= {f"{_note(**given)[:-1]}{rank}" for rank in range(world_size)}
            if not run.failure:
                run = kit.run_again(replace(run, cell=Cell(function, given, world_size)))
        folders = {text: _folder(run.directory / "training", text) for text in self}
        return {
            text: "" if all(map(Path.exists, map(folder.joinpath, notes))) else _reason(run)
            for text, folder in folders.items()
        }


def _folder(directory: Path, text: str) -> Path:
    folder = directory / hashlib.sha256(text.encode()).hexdigest()[:8]
    folder.mkdir(exist_ok=True)
    return folder


def _note(number: int = 0) -> str:
    return f"followed-in-{number}-by-{os.environ.get('RANK', '0')}"


def _reason(run: Run) -> str:
    return run.failure or "an earlier case failed"


def _barrier() -> None:
    if torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()


def train(
    checkpointer: resumekit.Checkpointer,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    leave_after: int = NUM_STEPS,
    is_alike: bool = False,
    each_step: Callable[[], object] | None = None,
) -> tuple[int, list[torch.Tensor]]:
    """The number of steps of this launch, and what this rank holds of the parameters after them.

    Args:
        checkpointer: of the run.
        model: takes rows of 4.
        optimizer: of the model.
        leave_after: the last step of this launch.
        is_alike: whether all ranks take the same data.
        each_step: called before the step is counted.
    """
    data = TensorDataset(torch.arange(32.0 * NUM_STEPS).reshape(-1, 4).cos())
    sampler = DistributedSampler(data, 1 if is_alike else None, 0 if is_alike else None)
    loader = DataLoader(data, batch_size=8 if is_alike else 4, sampler=sampler)
    num_steps = 0
    with checkpointer:
        for (batch,) in checkpointer.batches(loader, epochs=1):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if each_step is not None:
                each_step()
            checkpointer.step()
            num_steps += 1
            if checkpointer.progress.step == leave_after:
                break
        return num_steps, [local(each).detach().clone() for each in model.parameters()]


class Count:
    """A count of the user's.

    Args:
        by: what each step adds; by default another number on each rank.
    """

    def __init__(self, *, by: int | None = None) -> None:
        self.by = torch.distributed.get_rank() + 1 if by is None else by
        self.value = 0

    def grow(self) -> None:
        self.value += self.by

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def train_with_count(
    directory: Path,
    pattern: SharingPattern,
    process_group: list[int] | None = None,
    *,
    count: Count | None = None,
    leave_after: int = NUM_STEPS,
    **options: Any,
) -> tuple[int, list[torch.Tensor]]:
    """As ``train``, with a count that the ranks share in this way; it follows the parameters."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    is_one = torch.distributed.get_world_size() == 1
    model: nn.Module = net if is_one else nn.parallel.DistributedDataParallel(net)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    count = count or Count()
    components = [
        StateComponent("model", net),
        StateComponent("optimizer", optimizer),
        StateComponent("callbacks/count", count, pattern, process_group=process_group),
    ]
    given = {"save_every": 1, "loop_variables": "off", **options}
    num_steps, ends = train(
        resumekit.Checkpointer(directory, components=components, **given),
        *(model, optimizer),
        leave_after=leave_after,
        each_step=count.grow,
    )
    return num_steps, [*ends, torch.tensor(count.value)]


def assert_exact(directory: Path, launch: Callable[..., tuple[int, list[torch.Tensor]]]) -> None:
    """A training that is interrupted ends as one that is not, on this rank.

    Args:
        directory: of both runs.
        launch: makes the objects and calls ``train``: ``launch(directory, leave_after=...)``.
    """
    num_steps, whole = launch(directory / "whole", leave_after=NUM_STEPS)
    assert num_steps == NUM_STEPS
    half = NUM_STEPS // 2
    num_steps, before = launch(directory / "run", leave_after=half)
    assert num_steps == half
    num_steps, after = launch(directory / "run", leave_after=NUM_STEPS)
    assert num_steps == NUM_STEPS - half
    assert all(map(torch.equal, whole, after))
    assert not all(map(torch.equal, whole, before))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
