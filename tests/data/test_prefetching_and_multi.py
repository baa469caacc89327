"""How frameworks draw: one batch ahead, or from loaders of other lengths; each continues."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resumekit.data.position import DataPosition, SkippedLoader
from resumekit.data.prefetching import PrefetchedLoader
from resumekit.data.source import CombinedLoaders
from resumekit.errors import DataPositionError
from resumekit.run.randomness import RandomState
from resumekit.state import Fidelity

EPOCHS = 3


def position_of(source: Any) -> tuple[int, int]:
    """Epoch and batch of the next batch; the end of an epoch is the start of the next one."""
    if source.epoch_batches and source.batch >= source.epoch_batches:
        return source.epoch + 1, 0
    return source.epoch, source.batch


class Noisy(Dataset[Any]):
    """Draws from all three global generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), torch.rand(()).item()


class Stream(IterableDataset[Any]):
    """The same numbers, sharded among the workers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.length, step):
            yield number, random.random(), float(np.random.rand()), torch.rand(()).item()


class Remembering(Stream):
    """A stream that says itself where it is."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.num_given = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.num_given, self.length):
            self.num_given += 1
            yield number, random.random(), float(np.random.rand()), torch.rand(()).item()
        self.num_given = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_given": self.num_given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_given = state["num_given"]


def loader(dataset: Any, workers: str = "0", shuffle: bool | None = None) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=4,
        shuffle=shuffle,
        num_workers=0 if workers == "0" else 2,
        persistent_workers=workers == "persistent",
    )


def shuffled(length: int, workers: str = "0") -> DataLoader[Any]:
    return loader(Noisy(length), workers, shuffle=True)


def stateful(dataset: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, batch_size=4)


def without_length() -> Any:
    class Endless(torch.utils.data.Sampler[list[int]]):
        def __iter__(self) -> Iterator[list[int]]:
            yield from torch.randperm(20).view(5, 4).tolist()

    return DataLoader(Noisy(20), batch_sampler=Endless())


FEEDS: dict[str, Callable[[], Any]] = {
    "ahead of a stream": lambda: PrefetchedLoader(loader(Stream(18))),
    "ahead of a stream in 2 workers": lambda: PrefetchedLoader(loader(Stream(18), "2")),
    "ahead of a stream in persistent workers": lambda: PrefetchedLoader(
        loader(Stream(18), "persistent")
    ),
    "ahead of a stream of one batch": lambda: PrefetchedLoader(loader(Stream(3))),
    "ahead of a stream with a state": lambda: PrefetchedLoader(stateful(Remembering(18))),
    "ahead of batches without a length": lambda: PrefetchedLoader(without_length()),
    "as long as the longest": lambda: CombinedLoaders(
        {"a": shuffled(10), "b": shuffled(22), "c": shuffled(24)}, "nothing"
    ),
    "as long as the first": lambda: CombinedLoaders(
        {"a": shuffled(22), "b": shuffled(4)}, "nothing"
    ),
    "once more": lambda: CombinedLoaders(
        {"a": shuffled(10), "b": shuffled(22), "c": shuffled(3)}, "again"
    ),
    "once more in workers": lambda: CombinedLoaders(
        {"a": shuffled(10, "2"), "b": shuffled(30, "persistent")}, "again"
    ),
    "the longest in persistent workers": lambda: CombinedLoaders(
        {"a": shuffled(10, "persistent"), "b": shuffled(22, "2")}, "nothing"
    ),
    "once more of streams": lambda: CombinedLoaders(
        {"a": loader(Stream(10)), "b": loader(Stream(22))}, "again"
    ),
    "as long as the longest of streams": lambda: CombinedLoaders(
        {"a": loader(Stream(22)), "b": loader(Stream(10))}, "nothing"
    ),
}
LOST_IF_LEFT_EARLY = "ahead of a stream in persistent workers"
IN_WORKERS = {"ahead of a stream in 2 workers", LOST_IF_LEFT_EARLY}
IN_WORKERS |= {"once more in workers", "the longest in persistent workers"}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train(
    given: Any, saved: dict[str, Any] | None = None, *, num_steps: int = 10**6
) -> tuple[list[Any], list[dict[str, Any]]]:
    """What every step saw and drew, and the state at every safe point.

    An epoch is left after so many steps.
    """
    position = DataPosition()
    rng = RandomState({}, position)
    if saved is not None:
        saved = copy.deepcopy(saved)
        position.load_state_dict(saved["data"])
        rng.load_state_dict(saved["rng"])
    feed = position.feed(given)
    seen: list[Any] = []
    stops: list[dict[str, Any]] = []

    def restore() -> None:
        rng.restore()

    while feed.epoch < EPOCHS:
        rng.begin(feed, feed.epoch, restore)
        while feed.batch < num_steps:
            used_up = feed.used_up
            try:
                batch = feed.next_batch()
            except StopIteration:
                break
            assert not used_up
            drawn = (random.random(), float(np.random.rand()), torch.rand(()).item())
            seen.append((_plain(batch), feed.num_samples, drawn))
            if not feed.used_up and feed.batch < num_steps:
                stops.append(current(len(seen), position, rng))
        feed.end_epoch()
        stops.append(current(len(seen), position, rng))
    return seen, stops


def current(num_seen: int, position: DataPosition, rng: RandomState) -> dict[str, Any]:
    state = {"seen": num_seen, "data": position.state_dict(), "rng": rng.state_dict()}
    return copy.deepcopy(state)


def _plain(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: _plain(each) for name, each in batch.items()}
    return None if batch is None else [part.tolist() for part in batch]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("num_steps", [10**6, 4])
@pytest.mark.parametrize("name", FEEDS)
def test_every_safe_point_continues_bit_for_bit(name: str, num_steps: int) -> None:
    if name in ("ahead of a stream with a state", LOST_IF_LEFT_EARLY):
        num_steps = 10**6  # left early, the first continues there
    seed_everything(0)
    seen, stops = train(FEEDS[name](), num_steps=num_steps)
    if name in IN_WORKERS:  # an even and an odd number of batches, and between two epochs
        length = len(stops) // EPOCHS
        stops = [stops[1], stops[length - 1], stops[2 * length - 2]]
    for saved in stops:
        seed_everything(100)
        rest, _ = train(FEEDS[name](), saved, num_steps=num_steps)
        assert rest == seen[saved["seen"] :], saved["seen"]


def test_an_epoch_that_is_left_while_persistent_workers_are_ahead_is_reported_as_lost() -> None:
    position = DataPosition()
    feed = position.feed(FEEDS[LOST_IF_LEFT_EARLY]())
    RandomState({}, position).begin(feed, 0, lambda: None)
    for _ in range(4):
        feed.next_batch()
    assert {each.fidelity[0] for each in feed.sources} == {Fidelity.EXACT}
    feed.end_epoch()
    assert {each.fidelity[0] for each in feed.sources} == {Fidelity.LOST}


def test_one_batch_ahead_it_draws_in_the_order_of_a_loop_that_looks_ahead() -> None:
    def stock() -> Iterator[Any]:
        for _ in range(EPOCHS):
            batches = iter(loader(Stream(18)))
            following = next(batches)
            for batch in itertools.chain(batches, [None]):
                given, following = following, batch
                yield [part.tolist() for part in given]

    seed_everything(0)
    seen, _ = train(PrefetchedLoader(loader(Stream(18))))
    seed_everything(0)
    expected = []
    for batch in stock():
        expected.append((batch, (random.random(), float(np.random.rand()), torch.rand(()).item())))
    assert [(batch, drawn) for batch, _, drawn in seen] == expected


def test_the_batch_ahead_of_another_position_does_not_continue() -> None:
    seed_everything(0)
    seen, stops = train(PrefetchedLoader(loader(Stream(18))))
    saved = copy.deepcopy(stops[1])
    saved["data"]["train"]["ahead"] = stops[0]["data"]["train"]["ahead"]
    assert train(PrefetchedLoader(loader(Stream(18))), stops[1])[0] == seen[2:]
    assert train(PrefetchedLoader(loader(Stream(18))), saved)[0] != seen[2:]


@pytest.mark.parametrize("mode", ["again", "nothing"])
def test_shorter_loaders_end_or_begin_again(mode: Any) -> None:
    loaders = {"a": loader(range(8), shuffle=False), "b": loader(range(20), shuffle=False)}
    feed = DataPosition().feed(CombinedLoaders(loaders, mode))
    assert feed.num_batches == 5
    feed.begin(0)
    given = [feed.next_batch()["a"] for _ in range(5)]
    firsts = [None if each is None else int(each[0]) for each in given]
    assert firsts == ([0, 4, 0, 4, 0] if mode == "again" else [0, 4, None, None, None])
    assert feed.used_up
    with pytest.raises(StopIteration):
        feed.next_batch()
    feed.end_epoch()
    assert [position_of(source) for source in feed.sources] == [(1, 0), (1, 0)]


@pytest.mark.parametrize("dataset", [range(20), Stream(20)], ids=["map", "stream"])
def test_a_loader_that_skips_batches_is_the_whole_one_at_their_number(dataset: Any) -> None:
    whole = loader(dataset, shuffle=None if isinstance(dataset, Stream) else True)
    former = DataPosition()
    feed = former.feed(whole)
    feed.begin(0)
    for _ in range(3):
        feed.next_batch()
    resumed = DataPosition()
    resumed.load_state_dict(former.state_dict())
    with pytest.raises(DataPositionError, match="skips 2 batches of epoch 0, expected 3"):
        resumed.feed(SkippedLoader(whole, 2))
    source = resumed.feed(SkippedLoader(whole, 3))
    assert source is resumed.feed(whole)
    source.begin(0)
    assert source.next_batch() is not None
    assert source.next_batch() is not None
    with pytest.raises(StopIteration):
        source.next_batch()
    source.end_epoch()
    assert resumed.feed(SkippedLoader(whole, 0)) is source
    with pytest.raises(DataPositionError, match="skips 3 batches of epoch 1, expected 0"):
        resumed.feed(SkippedLoader(whole, 3))
