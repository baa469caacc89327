"""A loader around a loader that fetches ahead of the loop continues where the loop was."""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from resumekit.capture.rng import RngState
from resumekit.data.iterable import ReplaySource
from resumekit.data.position import DataPosition, open_source
from resumekit.data.prefetching import WrappedSource
from resumekit.errors import DataPositionError

EPOCHS = 3
NUM_SAMPLES = 22
BATCH_SIZE = 4  # the last batch of an epoch is a partial one


def position_of(source: Any) -> tuple[int, int]:
    """Epoch and batch of the next batch; the end of an epoch is the start of the next one."""
    if source.epoch_batches and source.batch >= source.epoch_batches:
        return source.epoch + 1, 0
    return source.epoch, source.batch


class Noisy(Dataset[Any]):
    """Draws from all three global generators."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), torch.rand(()).item()


class FetchesAhead:
    """The shape of a framework's loader: it holds another and is ``depth`` batches ahead.

    It draws random numbers when it begins, and counts its epochs.
    """

    def __init__(self, inner: Any, depth: int) -> None:
        self.base_dataloader = inner
        self.depth = depth
        self.epochs_set: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def set_epoch(self, epoch: int) -> None:
        self.epochs_set.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        torch.rand(())
        waiting: deque[Any] = deque()
        for batch in self.base_dataloader:
            waiting.append(batch)
            if len(waiting) > self.depth:
                yield waiting.popleft()
        yield from waiting


def make_loader(depth: int, workers: str) -> FetchesAhead:
    inner: DataLoader[Any] = DataLoader(
        Noisy(),
        batch_size=BATCH_SIZE,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
        num_workers=0 if workers == "0" else 2,
        persistent_workers=workers == "persistent",
    )
    return FetchesAhead(inner, depth)


def train(
    loader: Any, saved: dict[str, Any] | None = None
) -> tuple[list[Any], list[dict[str, Any]]]:
    """What every step saw and drew, and the state at every safe point."""
    position, rng = DataPosition(), RngState({})
    if saved is not None:
        position.load_state_dict(copy.deepcopy(saved["data"]))
    source = position.open(loader, "train")
    seen: list[Any] = []
    stops: list[dict[str, Any]] = []
    resumed = saved is not None
    while position_of(source)[0] < EPOCHS:
        epoch, batch_number = position_of(source)
        if resumed and batch_number == 0:
            rng.load_state_dict(saved["rng"])  # type: ignore[index]
            source.restore_generators()
        source.begin(epoch)
        if resumed and batch_number > 0:
            source.restore_generators()
            rng.load_state_dict(saved["rng"])  # type: ignore[index]
        resumed = False
        while not source.used_up:
            batch = source.next_batch()
            drawn = (random.random(), float(np.random.rand()), torch.rand(()).item())
            seen.append(([part.tolist() for part in batch], list(source.indices), drawn))
            if not source.used_up:
                stops.append(current(position, rng))
        with pytest.raises(StopIteration):
            source.next_batch()
        source.end_epoch()
        stops.append(current(position, rng))
    return seen, stops


def current(position: DataPosition, rng: RngState) -> dict[str, Any]:
    return copy.deepcopy({"data": position.state_dict(), "rng": rng.state_dict()})


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_every_safe_point_continues_bit_for_bit(depth: int) -> None:
    seed_everything(0)
    seen, stops = train(make_loader(depth, "0"))
    for number, saved in enumerate(stops[:-1], start=1):
        seed_everything(100)
        assert train(make_loader(depth, "0"), saved)[0] == seen[number:], number


@pytest.mark.parametrize("workers", ["2", "persistent"])
def test_the_workers_random_numbers_continue_too(workers: str) -> None:
    seed_everything(0)
    seen, stops = train(make_loader(1, workers))
    for number in (4, 9):
        seed_everything(100)
        assert train(make_loader(1, workers), stops[number - 1])[0] == seen[number:], number


@pytest.mark.parametrize(("part", "other"), [("ahead", 7), ("generators", 2)])
def test_a_state_with_one_part_of_another_position_does_not_continue(part: str, other: int) -> None:
    # The sampler's generator draws once an epoch: its state is another one only in another epoch.
    seed_everything(0)
    seen, stops = train(make_loader(1, "0"))
    saved = copy.deepcopy(stops[8])
    assert train(make_loader(1, "0"), saved)[0] == seen[9:]
    saved["data"]["train"][part] = stops[other]["data"]["train"][part]
    assert train(make_loader(1, "0"), saved)[0] != seen[9:]


def test_the_loop_draws_what_a_stock_loop_draws() -> None:
    seed_everything(0)
    seen, _ = train(make_loader(1, "0"))
    seed_everything(0)
    stock = []
    loader = make_loader(1, "0")
    for _ in range(EPOCHS):
        for batch in loader:
            drawn = (random.random(), float(np.random.rand()), torch.rand(()).item())
            stock.append(([part.tolist() for part in batch], drawn))
    assert [(batch, drawn) for batch, _, drawn in seen] == stock


def test_the_loader_is_reported_its_epoch_and_stays_as_it_is() -> None:
    loader = make_loader(1, "0")
    inner = loader.base_dataloader
    train(loader)
    assert loader.epochs_set == [0, 1, 2]
    assert loader.base_dataloader is inner
    assert type(inner.batch_sampler) is BatchSampler


def test_an_epoch_that_is_left_early_leaves_nothing_ahead() -> None:
    source = open_source(make_loader(1, "0"), "train")
    source.begin(0)
    source.next_batch()
    assert len(source.state_dict()["ahead"]) == 1
    source.end_epoch()
    state = source.state_dict()
    assert (position_of(source), state["ahead"]) == ((1, 0), [])
    assert (state["inner"]["epoch"], state["inner"]["batch"]) == (1, 0)


def test_a_batch_that_was_not_drawn_from_the_inner_loader_is_an_error() -> None:
    class Invents(FetchesAhead):
        def __iter__(self) -> Iterator[Any]:
            yield [torch.zeros(1)]

    source = open_source(Invents(DataLoader(Noisy()), 0), "train")
    assert isinstance(source, WrappedSource)
    source.begin(0)
    with pytest.raises(DataPositionError, match="a batch of Invents that this rank did not draw"):
        source.next_batch()


def test_a_loader_around_a_stream_is_replayed() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(5)

    source = open_source(FetchesAhead(DataLoader(Stream()), 1), "train")
    assert isinstance(source, ReplaySource)
