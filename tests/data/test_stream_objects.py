"""A stream whose objects training changes gives the same batches again after a resume."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from resumekit.adapters.torch import Checkpointer

EPOCHS, SIZE, BATCH_SIZE, SAVE_EVERY = 4, 8, 2, 3
NUM_STEPS = EPOCHS * SIZE // BATCH_SIZE


class ReplayBuffer:
    """What training fills."""

    def __init__(self) -> None:
        self.items = [random.random() for _ in range(4)]

    def sample(self, size: int) -> list[float]:
        return random.choices(self.items, k=size)


class Sampled(IterableDataset[float]):
    """Draws all samples of an epoch before it gives the first one."""

    def __init__(self) -> None:
        self.buffer = ReplayBuffer()

    def __iter__(self) -> Iterator[float]:
        yield from self.buffer.sample(SIZE)


class Counting(Sampled):
    """Leaves a counter and a list behind, of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.num_given = 0
        self.given: list[float] = []

    def __iter__(self) -> Iterator[float]:
        samples = self.buffer.sample(SIZE)
        for sample in samples:
            self.num_given += 1
            self.given.append(sample)
            yield sample + self.num_given + sum(self.given)


class KilledError(Exception):
    pass


def train(
    directory: Path,
    make: Callable[[], Any],
    *,
    last: int,
    grows: bool = True,
    in_loader: bool = True,
    **options: Any,
) -> dict[int, Any]:
    """The batches of the steps of one launch, by step; it is killed after ``last``."""
    random.seed(3)
    torch.manual_seed(3)
    dataset = make()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, BATCH_SIZE) if in_loader else dataset
    batches = {}
    with Checkpointer(
        directory, model=model, optimizer=optimizer, save_every=SAVE_EVERY, **options
    ) as checkpointer:
        for batch in checkpointer.batches(loader, epochs=EPOCHS):
            step = checkpointer.progress.step + 1
            batches[step] = batch.tolist() if in_loader else batch
            if grows:
                dataset.buffer.items.append(random.random())
            checkpointer.step()
            if step == last:
                raise KilledError
    return batches


def resumed(
    directory: Path, make: Callable[[], Any], *, kill: int, **options: Any
) -> dict[int, Any]:
    """The batches of a launch after one that was killed."""
    with pytest.raises(KilledError):
        train(directory, make, last=kill, **options)
    return train(directory, make, last=-1, **options)


def is_exact(tmp_path: Path, make: Callable[[], Any], *, kill: int, **options: Any) -> bool:
    expected = train(tmp_path / "reference", make, last=-1, **options)
    found = resumed(tmp_path / "killed", make, kill=kill, **options)
    assert len(found) < len(expected)
    return all(expected[step] == batch for step, batch in found.items())


KILLS = pytest.mark.parametrize("kill", [4, 8, 11, 13])  # saves within epochs and between two


@KILLS
@pytest.mark.parametrize("in_loader", [True, False])
@pytest.mark.parametrize("make", [Sampled, Counting])
def test_a_stream_over_a_replay_buffer_is_exact(
    tmp_path: Path, make: Callable[[], Any], kill: int, in_loader: bool
) -> None:
    assert is_exact(tmp_path, make, kill=kill, in_loader=in_loader)


def test_without_the_state_of_its_objects_it_differs(tmp_path: Path) -> None:
    assert not is_exact(tmp_path, Sampled, kill=8, transient={"items"})
