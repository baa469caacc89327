"""An interrupted loop over a stock loader continues with the same samples and random numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from resumekit.capture.rng import RngState
from resumekit.data import DistributedResumableSampler, ResumableSampler
from resumekit.data.position import DataPosition, open_source
from resumekit.data.workers import read_states
from resumekit.errors import ConfigurationError, DataPositionError
from resumekit.serialization.digests import state_digest
from resumekit.state import Fidelity

EPOCHS = 3
BATCH_SIZE = 4
NUM_SAMPLES = 22  # the last batch of an epoch is a partial one


def position_of(source: Any) -> tuple[int, int]:
    """Epoch and batch of the next batch; the end of an epoch is the start of the next one."""
    if source.epoch_batches and source.batch >= source.epoch_batches:
        return source.epoch + 1, 0
    return source.epoch, source.batch


class Noisy(Dataset[Any]):
    """Counts what is read of it, and draws from all three global generators."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        return index, random.random(), float(np.random.rand()), torch.rand(()).item()


class InBatches(Noisy):
    """Gives whole batches, as ``datasets`` does, and cannot make one of nothing."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        first, *_ = noisy = [self[index] for index in indices]
        return [(*each, first[0]) for each in noisy]


class Jittered(Noisy):
    """A transform of it has a private generator."""

    def __init__(self) -> None:
        super().__init__()
        self.transforms = [{"jitter": random.Random(7)}]


def collate_with(rng: random.Random) -> Any:
    return lambda samples: (default_collate(samples), rng.random())


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("of_collate", [False, True])
def test_private_generators_in_workers_are_lost_however_deep(split: bool, of_collate: bool) -> None:
    data: Any = Noisy() if of_collate else Jittered()
    data = torch.utils.data.Subset(data, [0, 1, 2]) if split else data
    options = {"collate_fn": collate_with(random.Random(3))} if of_collate else {}
    word, reason = open_source(DataLoader(data, num_workers=1, **options), "train").fidelity
    assert word is Fidelity.LOST
    assert ("collate_fn." if of_collate else "jitter") in reason
    plain = open_source(DataLoader(Noisy(), num_workers=1), "train")
    assert plain.fidelity == (Fidelity.EXACT, "")


class Halves(Sampler[int]):
    """A user's sampler with a private generator, written as a generator function."""

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        order = list(range(NUM_SAMPLES))
        self.rng.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return NUM_SAMPLES


class TwoParts(Halves):
    """A sampler that draws the second part of its order only when the first one is used up."""

    def __init__(self) -> None:
        self.rng: Any = np.random.default_rng(7)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(12).tolist()
        yield from (12 + self.rng.permutation(NUM_SAMPLES - 12)).tolist()


class AsItGoes(Halves):
    """A sampler that draws each index when it is asked for it, from generators that all share."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(NUM_SAMPLES))
        while left:
            draw = np.random.randint if len(left) % 3 else random.randrange
            yield left.pop(draw(len(left)))


class BatchesAsTheyGo:
    """The same for a batch sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(len(self)):
            yield torch.randint(NUM_SAMPLES, (random.randint(1, BATCH_SIZE),)).tolist()

    def __len__(self) -> int:
        return 6


class EagerBatches:
    """A user's batch sampler whose ``__iter__`` draws at once, from the global generator."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(NUM_SAMPLES).tolist()
        return iter([order[i : i + BATCH_SIZE] for i in range(0, NUM_SAMPLES, BATCH_SIZE)])

    def __len__(self) -> int:
        return -(-NUM_SAMPLES // BATCH_SIZE)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(9)


def distributed(data: Any) -> DistributedSampler[Any]:
    return DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=2)


LOADERS: dict[str, Callable[[Any, Any], DataLoader[Any]]] = {
    "shuffle": lambda d, kw: DataLoader(d, BATCH_SIZE, shuffle=True, **kw),
    "drop_last": lambda d, kw: DataLoader(d, BATCH_SIZE, shuffle=True, drop_last=True, **kw),
    "generator": lambda d, kw: DataLoader(d, BATCH_SIZE, shuffle=True, generator=generator(), **kw),
    "in_order": lambda d, kw: DataLoader(d, BATCH_SIZE, **kw),
    "replacement": lambda d, kw: DataLoader(
        d,
        BATCH_SIZE,
        sampler=RandomSampler(d, replacement=True, num_samples=70, generator=generator()),
        **kw,
    ),
    "weighted": lambda d, kw: DataLoader(
        d, BATCH_SIZE, sampler=WeightedRandomSampler([1.0] * NUM_SAMPLES, 18), **kw
    ),
    "distributed": lambda d, kw: DataLoader(d, BATCH_SIZE, sampler=distributed(d), **kw),
    "resumable": lambda d, kw: DataLoader(d, BATCH_SIZE, sampler=ResumableSampler(d), **kw),
    "distributed resumable": lambda d, kw: DataLoader(
        d,
        BATCH_SIZE,
        sampler=DistributedResumableSampler(d, num_replicas=2, rank=1, seed=2),
        **kw,
    ),
    "own sampler": lambda d, kw: DataLoader(d, BATCH_SIZE, sampler=Halves(), **kw),
    "as it goes": lambda d, kw: DataLoader(d, BATCH_SIZE, sampler=AsItGoes(), **kw),
    "batches as they go": lambda d, kw: DataLoader(d, batch_sampler=BatchesAsTheyGo(), **kw),
    "in two parts": lambda d, kw: DataLoader(d, BATCH_SIZE, sampler=TwoParts(), **kw),
    "even epochs": lambda d, kw: DataLoader(d, 2, shuffle=True, generator=generator(), **kw),
    "batch sampler": lambda d, kw: DataLoader(
        d, batch_sampler=BatchSampler(RandomSampler(d), BATCH_SIZE, drop_last=False), **kw
    ),
    "eager batch sampler": lambda d, kw: DataLoader(d, batch_sampler=EagerBatches(), **kw),
}
WORKERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "fresh workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
    "three persistent workers": {
        "num_workers": 3,
        "persistent_workers": True,
        "prefetch_factor": 3,
    },
}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def train_on(batch: Any) -> tuple[Any, ...]:
    """What a training step does to the random state, and what it saw."""
    seen = tuple(torch.as_tensor(part).tolist() for part in batch)
    return (*seen, random.random(), float(np.random.rand()), torch.rand(()).item())


class Loop:
    """A loop over one loader that can be left at any safe point and taken up by another."""

    def __init__(self, loader: DataLoader[Any], saved: dict[str, Any] | None = None) -> None:
        self.position = DataPosition()
        self.rng = RngState()
        self.saved = saved
        if saved is not None:
            self.position.load_state_dict(saved["data"])
        self.source = self.position.open(loader, "train")

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"data": self.position.state_dict(), "rng": self.rng.state_dict()})

    def run(self, stops: list[dict[str, Any]] | None = None) -> list[Any]:
        seen = []
        while position_of(self.source)[0] < EPOCHS:
            if stops is not None:
                stops.append(self.state())
            if not self.source.begun:
                self.begin()
            seen.append(train_on(self.source.next_batch()))
            if self.source.used_up:
                with pytest.raises(StopIteration):
                    self.source.next_batch()
                self.source.end_epoch()
        return seen

    def begin(self) -> None:
        epoch, batch = position_of(self.source)
        saved, self.saved = self.saved, None
        if saved is not None and batch == 0:
            self.rng.load_state_dict(saved["rng"])
            self.source.restore_generators()
        self.source.begin(epoch)
        if saved is not None and batch > 0:
            self.source.restore_generators()
            self.rng.load_state_dict(saved["rng"])


def uninterrupted(kind: str, workers: str) -> tuple[list[Any], list[dict[str, Any]]]:
    seed_everything(1)
    stops: list[dict[str, Any]] = []
    return Loop(LOADERS[kind](Noisy(), WORKERS[workers])).run(stops), stops


def continued(kind: str, workers: str, saved: dict[str, Any]) -> list[Any]:
    seed_everything(1234)
    return Loop(LOADERS[kind](Noisy(), WORKERS[workers]), saved).run()


def kill_points(stops: list[dict[str, Any]]) -> list[int]:
    """Some safe points: a boundary, and an odd and an even number of batches inside epochs."""
    length = len(stops) // EPOCHS
    return sorted({1, length - 1, length, 2 * length - 2})


@pytest.mark.parametrize("kind", LOADERS)
def test_without_workers_every_safe_point_continues_bit_for_bit(kind: str) -> None:
    expected, stops = uninterrupted(kind, "no workers")
    assert len(stops) == len(expected)
    for used, saved in enumerate(stops):
        assert continued(kind, "no workers", saved) == expected[used:], used


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("shuffle", "fresh workers"),
        ("even epochs", "fresh workers"),
        ("replacement", "fresh workers"),
        ("eager batch sampler", "fresh workers"),
        ("shuffle", "persistent workers"),
        ("even epochs", "persistent workers"),
        ("resumable", "persistent workers"),
        ("in two parts", "persistent workers"),
    ],
)
def test_with_workers_their_random_numbers_continue_too(kind: str, workers: str) -> None:
    expected, stops = uninterrupted(kind, workers)
    for stop in kill_points(stops):
        assert continued(kind, workers, stops[stop]) == expected[stop:], stop


@pytest.mark.parametrize("workers", ["fresh workers", "persistent workers"])
def test_a_dataset_in_workers_is_never_asked_for_a_batch_of_nothing(workers: str) -> None:
    def loop(saved: dict[str, Any] | None = None) -> Loop:
        loader = DataLoader(InBatches(), BATCH_SIZE, shuffle=True, **WORKERS[workers])
        return Loop(loader, saved)

    seed_everything(1)
    stops: list[dict[str, Any]] = []
    expected = loop().run(stops)
    for stop in (1, 3, 7):
        seed_everything(1234)
        assert loop(stops[stop]).run() == expected[stop:], stop


class DrawsSeldom(Noisy):
    """Draws for few samples, so that most batches leave a generator as it was."""

    def __getitem__(self, index: int) -> Any:
        drawn = random.random() if index % 7 == 0 else 0.0
        return index, drawn, float(np.random.rand()) if index % 11 == 0 else 0.0


@pytest.mark.parametrize("workers", ["fresh workers", "persistent workers"])
def test_workers_that_draw_seldom_continue_at_every_safe_point(workers: str) -> None:
    seed_everything(1)
    stops: list[dict[str, Any]] = []
    expected = Loop(DataLoader(DrawsSeldom(), 2, shuffle=True, **WORKERS[workers])).run(stops)
    for used in range(1, len(stops), 4):
        seed_everything(1234)
        loader = DataLoader(DrawsSeldom(), 2, shuffle=True, **WORKERS[workers])
        assert Loop(loader, stops[used]).run() == expected[used:], used


class DrawsOnce(Noisy):
    """Draws for the second sample that is read, and gives the state after each."""

    def __getitem__(self, index: int) -> bytes:
        self.num_reads += 1
        if self.num_reads == 2:
            random.random()
        return read_states()["python"]


def test_the_state_of_a_worker_is_known_although_the_batch_that_changed_it_is_dropped() -> None:
    loader = DataLoader(
        DrawsOnce(), 1, num_workers=1, persistent_workers=True, prefetch_factor=3, collate_fn=list
    )
    source = open_source(loader, "train")
    states = []
    for epoch in (0, 1):
        source.begin(epoch)
        states += source.next_batch()
        assert source.state_dict()["workers"][0]["states"]["python"] == states[-1]
        source.close()  # without the end of the epoch: its prefetched batches are dropped
    assert states[0] != states[1]


def seed_worker(worker: int) -> None:
    """A ``worker_init_fn`` as users write it: it seeds what torch does not seed."""
    random.seed(worker)
    np.random.seed(worker)


def noisy_collate(samples: list[Any]) -> list[Any]:
    """A collate function that draws, as one does that masks tokens or crops a batch."""
    return [*default_collate(samples), random.random(), float(np.random.rand())]


@pytest.mark.parametrize("workers", ["fresh workers", "persistent workers"])
def test_a_worker_init_fn_that_seeds_does_not_undo_the_restored_random_state(workers: str) -> None:
    def loop(saved: dict[str, Any] | None = None) -> Loop:
        settings: dict[str, Any] = {"worker_init_fn": seed_worker, "collate_fn": noisy_collate}
        return Loop(DataLoader(Noisy(), 4, shuffle=True, **settings, **WORKERS[workers]), saved)

    seed_everything(1)
    stops: list[dict[str, Any]] = []
    expected = loop().run(stops)
    for stop in (3, 4):
        seed_everything(1234)
        assert loop(stops[stop]).run() == expected[stop:], stop


class Seeds(Noisy):
    """Gives the seed of its worker, as a dataset does that makes a generator for each sample."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return index, info.seed


@pytest.mark.parametrize("workers", ["fresh workers", "persistent workers"])
@pytest.mark.parametrize("kind", ["shuffle", "replacement", "eager batch sampler"])
def test_workers_keep_their_seed_and_later_states_are_the_same(kind: str, workers: str) -> None:
    def loop(saved: dict[str, Any] | None = None) -> Loop:
        return Loop(LOADERS[kind](Seeds(), WORKERS[workers]), saved)

    seed_everything(1)
    stops: list[dict[str, Any]] = []
    expected = loop().run(stops)
    digests = [state_digest(each) for each in stops]
    for stop in (*kill_points(stops), len(stops) - 3):
        seed_everything(1234)
        again: list[dict[str, Any]] = []
        assert loop(stops[stop]).run(again) == expected[stop:], stop
        found = [state_digest(each) for each in again[1:]]
        assert found == digests[stop + 1 :], stop


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # a machine may have two cores
def test_three_persistent_workers_keep_their_order_into_the_next_epoch() -> None:
    expected, stops = uninterrupted("shuffle", "three persistent workers")
    for stop in (2, 4, 8, 10):
        assert continued("shuffle", "three persistent workers", stops[stop]) == expected[stop:]


def test_an_epoch_that_no_workers_begin_after_persistent_ones_continues_bit_for_bit() -> None:
    _, boundaries = uninterrupted("shuffle", "persistent workers")
    seed_everything(1234)
    stops: list[dict[str, Any]] = []
    saved = boundaries[len(boundaries) // EPOCHS]
    expected = Loop(LOADERS["shuffle"](Noisy(), {}), saved).run(stops)
    RngState().load_state_dict(saved["rng"])
    stock = [train_on(batch) for batch in LOADERS["shuffle"](Noisy(), {})]
    assert expected[: len(stock)] == stock
    for used in (1, 3):
        assert continued("shuffle", "no workers", stops[used]) == expected[used:], used


@pytest.mark.parametrize("kind", LOADERS)
def test_the_loop_draws_what_a_stock_loop_draws(kind: str) -> None:
    with_workers = ("fresh workers",) if kind in ("shuffle", "eager batch sampler") else ()
    for workers in ("no workers", *with_workers):
        watched, _ = uninterrupted(kind, workers)
        seed_everything(1)
        loader = LOADERS[kind](Noisy(), WORKERS[workers])
        stock: list[Any] = []
        for epoch in range(EPOCHS):
            if hasattr(loader.sampler, "set_epoch"):
                loader.sampler.set_epoch(epoch)
            stock.extend(train_on(batch) for batch in loader)
        assert watched == stock, workers


@pytest.mark.parametrize("left_out", ["start", "rng", "place"])
def test_a_state_with_one_part_left_out_does_not_continue(left_out: str) -> None:
    expected, stops = uninterrupted("shuffle", "no workers")
    saved = stops[8]
    if left_out == "start":
        saved["data"]["train"]["start"] = stops[0]["data"]["train"]["start"] or {
            "at_iter": RngState().state_dict(),
            "at_first": RngState().state_dict(),
        }
        with pytest.raises(DataPositionError, match="another order"):
            continued("shuffle", "no workers", saved)
        return
    if left_out == "rng":
        saved["rng"] = stops[0]["rng"]
    else:
        saved["data"]["train"].update(batch=0)
    rest = continued("shuffle", "no workers", saved)
    assert rest != expected[len(expected) - len(rest) :]


def test_without_the_workers_states_their_random_numbers_do_not_continue() -> None:
    expected, stops = uninterrupted("shuffle", "fresh workers")
    saved = stops[8]
    saved["data"]["train"]["workers"] = {}
    rest = continued("shuffle", "fresh workers", saved)
    assert rest != expected[len(expected) - len(rest) :]


def test_a_loader_that_is_not_opened_before_its_epoch_ends_begins_the_next_one() -> None:
    _, stops = uninterrupted("shuffle", "no workers")
    position = DataPosition()
    position.load_state_dict(stops[2]["data"])
    position.end_epoch(["train"])
    source = position.open(LOADERS["shuffle"](Noisy(), {}), "train")
    assert position_of(source) == (1, 0)


def test_used_samples_are_passed_over_without_reading_them() -> None:
    _, stops = uninterrupted("shuffle", "no workers")
    data = Noisy()
    loop = Loop(DataLoader(data, BATCH_SIZE, shuffle=True), stops[4])
    loop.begin()
    assert data.num_reads == 0


def test_a_changed_batch_size_is_refused_with_both_values() -> None:
    _, stops = uninterrupted("shuffle", "no workers")
    with pytest.raises(DataPositionError, match=r"batch_size 8.*expected.*batch_size 4"):
        Loop(DataLoader(Noisy(), 8, shuffle=True), stops[4])


def test_a_sampler_that_draws_from_elsewhere_is_caught_and_not_silently_reshuffled() -> None:
    class FromTheSystem(Halves):
        def __iter__(self) -> Iterator[int]:
            order = random.SystemRandom().sample(range(NUM_SAMPLES), NUM_SAMPLES)
            yield from map(int, order)

    def loader() -> DataLoader[Any]:
        return DataLoader(Noisy(), BATCH_SIZE, sampler=FromTheSystem())

    stops: list[dict[str, Any]] = []
    Loop(loader()).run(stops)
    with pytest.raises(DataPositionError, match="another order"):
        Loop(loader(), stops[10]).begin()


@pytest.mark.parametrize("kind", ["as it goes", "batches as they go", "own sampler"])
def test_random_states_are_kept_only_where_they_are_drawn_from_as_the_epoch_goes(kind: str) -> None:
    _, stops = uninterrupted(kind, "no workers")
    kept = stops[4]["data"]["train"]["draws"]
    assert bool(kept) == (kind != "own sampler")


def test_an_epoch_too_long_to_keep_its_states_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resumekit.data.workers.MAX_BYTES", 10_000)
    seed_everything(1)
    loop = Loop(DataLoader(Noisy(), BATCH_SIZE, sampler=AsItGoes()))
    loop.begin()
    words = []
    for _ in range(5):
        train_on(loop.source.next_batch())
        words.append(loop.position.fidelity[0])
    assert words[0] is Fidelity.EXACT
    assert words[-1] is Fidelity.LOST
    assert "draws from a global generator as it goes" in loop.position.fidelity[1]


def test_another_batch_size_is_refused_inside_an_epoch_that_is_drawn_as_it_goes() -> None:
    _, stops = uninterrupted("as it goes", "no workers")
    position = DataPosition(allowed_changes={"batch_size"})
    position.load_state_dict(stops[4]["data"])
    with pytest.raises(DataPositionError, match="AsItGoes that draws as it goes"):
        position.open(DataLoader(Noisy(), 2, sampler=AsItGoes()), "train")


def test_set_epoch_reaches_sampler_batch_sampler_and_dataset_once_an_epoch() -> None:
    calls: list[tuple[str, int]] = []

    class WithSetEpoch(Noisy):
        def set_epoch(self, epoch: int) -> None:
            calls.append(("dataset", epoch))

    class SamplerWithSetEpoch(Halves):
        def set_epoch(self, epoch: int) -> None:
            calls.append(("sampler", epoch))

    Loop(DataLoader(WithSetEpoch(), BATCH_SIZE, sampler=SamplerWithSetEpoch())).run()
    assert calls == [(who, epoch) for epoch in range(EPOCHS) for who in ("sampler", "dataset")]


def test_any_other_iterable_is_replayed_and_says_so() -> None:
    class Stream:
        def __iter__(self) -> Iterator[Any]:
            for index in range(6):
                yield (torch.tensor([index, random.randrange(100)]),)

    seed_everything(1)
    source = open_source(Stream(), "train")
    source.begin(0)
    first = [source.next_batch() for _ in range(3)]
    state = copy.deepcopy(source.state_dict())
    again = open_source(Stream(), "train")
    again.load_state_dict(state)
    again.begin(0)
    again.restore_generators()
    assert position_of(again) == (0, 3)
    assert "is replayed from the start of the epoch" in again.fidelity[1]
    assert torch.equal(again.next_batch()[0][:1], torch.tensor([3]))
    assert len(first) == 3


def test_a_second_loader_under_one_name_is_refused() -> None:
    position = DataPosition()
    position.open(DataLoader(Noisy()), "train")
    with pytest.raises(ConfigurationError, match="second loader"):
        position.open(DataLoader(Noisy()), "train")
