"""Loaders with a state of their own continue exactly, by that state or without it."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    get_worker_info,
)

from resumekit.capture.rng import RngState
from resumekit.data.iterable import ReplaySource
from resumekit.data.position import open_source
from resumekit.errors import DataPositionError
from resumekit.state import Fidelity

torchdata = pytest.importorskip(
    "torchdata.stateful_dataloader", reason="torchdata is not installed: pip install torchdata"
)
nodes = pytest.importorskip("torchdata.nodes", reason="torchdata is too old: pip install torchdata")
datasets = pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets")

torchdata_sampler = pytest.importorskip("torchdata.stateful_dataloader.sampler")

# torchdata 0.11 stateful_dataloader.py calls what torch 2.13 deprecates, in every constructor.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

EPOCHS = 2
NUM_SAMPLES = 22
BATCH_SIZE = 4


def position_of(source: Any) -> tuple[int, int]:
    """Epoch and batch of the next batch; the end of an epoch is the start of the next one."""
    if source.epoch_batches and source.batch >= source.epoch_batches:
        return source.epoch + 1, 0
    return source.epoch, source.batch


def keep(samples: list[Any]) -> list[Any]:
    """Collates nothing: plain values are quicker to send than tensors."""
    return samples


class Noisy(Dataset[Any]):
    """Counts what is read of it, and draws from all three global generators."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.num_reads += 1
        return index, random.random(), float(np.random.rand()), torch.rand(()).item()


class NoisyStream(IterableDataset[Any]):
    """Draws from the global generators, in its order too, and has no state."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for sample in torch.randperm(NUM_SAMPLES).tolist()[first::step]:
            yield sample, random.random(), torch.rand(()).item()


class StatefulStream(IterableDataset[Any]):
    """Keeps its own position, which continues from epoch to epoch, and draws for each sample."""

    def __init__(self) -> None:
        self.position = 0
        self.num_replayed = 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.position += 1
            self.num_replayed += 1
            yield self.position, random.random(), torch.rand(()).item()
            if self.position % NUM_SAMPLES == 0:
                return

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class OwnLoader:
    """A user's own loader, written as people write one: a protocol and nothing else."""

    def __init__(self, *, knows_its_length: bool) -> None:
        self.epoch = 0
        self.used = 0
        self.num_made = 0
        if knows_its_length:
            self.__class__ = SizedOwnLoader

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(self.epoch).sample(range(6), 6)
        while self.used < 6:
            self.used += 1
            self.num_made += 1
            yield order[self.used - 1], float(np.random.rand()), torch.rand(()).item()
        self.epoch, self.used = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.used = state["epoch"], state["used"]


class SizedOwnLoader(OwnLoader):
    def __len__(self) -> int:
        return 6


class Placed(IterableDataset[int]):
    """Each worker keeps its own position; nothing is drawn."""

    def __init__(self) -> None:
        self.used = 0

    def __iter__(self) -> Iterator[int]:
        info: Any = get_worker_info()
        mine = range(info.id, NUM_SAMPLES, info.num_workers)
        while self.used < len(mine):
            self.used += 1
            yield mine[self.used - 1]
        self.used = 0

    def state_dict(self) -> dict[str, int]:
        return {"used": self.used}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.used = state["used"]


class ByItsState:
    """What the page on data shows: a user's word that a loader's own state is enough."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


def stateful(dataset: Any, **settings: Any) -> Any:
    given = {"batch_size": BATCH_SIZE, "collate_fn": keep, **settings}
    return torchdata.StatefulDataLoader(dataset, **given)


def of_nodes(sampler: Any, *, threads: int = 2, data: Any = None, restarts: bool = True) -> Any:
    """torchdata's loader over nodes, which reads ahead in threads or reads in this one."""

    def read(indices: list[int]) -> list[Any]:
        return [index if data is None else data[index] for index in indices]

    node = nodes.Batcher(nodes.SamplerWrapper(sampler), BATCH_SIZE, drop_last=False)
    node = nodes.ParallelMapper(node, read, num_workers=threads, method="thread")
    if threads:
        node = nodes.Prefetcher(node, prefetch_factor=2)
    return nodes.Loader(node, restart_on_stop_iteration=restarts)


def shuffled(**settings: Any) -> Any:
    return RandomSampler(range(NUM_SAMPLES), **settings)


def with_generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def hugging_face(*, buffered: bool) -> Any:
    numbers = datasets.Dataset.from_dict({"number": list(range(NUM_SAMPLES))})
    stream = numbers.to_iterable_dataset(num_shards=4)
    if buffered:
        stream = stream.shuffle(seed=3, buffer_size=6)
    return stream.map(augmented)


def hugging_face_table() -> Any:
    return datasets.Dataset.from_dict({"number": list(range(NUM_SAMPLES))}).with_transform(noisy)


def noisy(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "noise": [random.random() for _ in columns["number"]]}


def augmented(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "noise": random.random() + float(np.random.rand())}


class Shards(IterableDataset[Any]):
    """Finds its place when it is iterated, and writes into the state that it was given."""

    def __init__(self) -> None:
        self.epoch = 0
        self.given: dict[str, int] | None = None

    def set_epoch(self, epoch: int) -> None:
        if self.given is None:
            self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        used = 0
        if self.given is not None:
            self.epoch, used = self.given["epoch"], self.given["used"]
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        for sample in order.tolist()[used:]:
            yield sample, random.random(), torch.rand(()).item()

    def state_dict(self, used: int = 0) -> dict[str, int]:
        state = {"epoch": self.epoch, "used": used}
        if self.given is None:
            return state
        self.given.update(state)
        return self.given

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state


class LateLoader(DataLoader[Any]):
    """Begins with its first batch, as that of litdata does."""

    def __init__(self) -> None:
        super().__init__(Shards(), BATCH_SIZE, collate_fn=keep)
        self.epoch, self.used = 0, 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        shards: Any = self.dataset
        if not self.used:
            shards.given = None
            self.epoch += 1
        shards.set_epoch(self.epoch)
        for batch in super().__iter__():
            self.used += len(batch)
            yield batch
        self.used = 0

    def state_dict(self) -> dict[str, Any]:
        shards: Any = self.dataset
        return {"shards": shards.state_dict(self.used), "epoch": self.epoch, "used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        shards: Any = self.dataset
        shards.load_state_dict(state["shards"])
        self.epoch, self.used = state["epoch"], state["used"]


FRESH: dict[str, Any] = {"num_workers": 2}
PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
LOADERS: dict[str, Callable[[], Any]] = {
    "own": lambda: OwnLoader(knows_its_length=False),
    "own with a length": lambda: OwnLoader(knows_its_length=True),
    "late": LateLoader,
    "map-style": lambda: stateful(Noisy(), shuffle=True),
    "map-style with a generator": lambda: stateful(
        Noisy(), shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "map-style in order": lambda: stateful(Noisy()),
    "map-style, 2 workers": lambda: stateful(Noisy(), shuffle=True, **FRESH),
    "map-style, persistent": lambda: stateful(Noisy(), shuffle=True, **PERSISTENT),
    "iterable": lambda: stateful(NoisyStream()),
    "iterable, 2 workers": lambda: stateful(NoisyStream(), **FRESH),
    "iterable, persistent": lambda: stateful(NoisyStream(), **PERSISTENT),
    "iterable with a state": lambda: stateful(StatefulStream()),
    "iterable with a state, 2 workers": lambda: stateful(StatefulStream(), **FRESH),
    "by its state, 2 workers": lambda: ByItsState(stateful(Placed(), **FRESH)),
    "nodes": lambda: of_nodes(shuffled()),
    "nodes with a generator": lambda: of_nodes(shuffled(generator=with_generator())),
    "nodes and a stateful sampler": lambda: of_nodes(
        torchdata_sampler.RandomSampler(range(NUM_SAMPLES), generator=with_generator())
    ),
    "nodes and set_epoch": lambda: of_nodes(
        DistributedSampler(Noisy(), num_replicas=1, rank=0), restarts=False
    ),
    "nodes in this thread": lambda: of_nodes(shuffled(), threads=0, data=Noisy()),
    "map-style of datasets": lambda: DataLoader(
        hugging_face_table(), BATCH_SIZE, shuffle=True, collate_fn=keep
    ),
    "streaming": lambda: DataLoader(hugging_face(buffered=False), BATCH_SIZE, collate_fn=keep),
    "streaming through a buffer": lambda: DataLoader(
        hugging_face(buffered=True), BATCH_SIZE, collate_fn=keep
    ),
    "streaming through a buffer, 2 workers": lambda: DataLoader(
        hugging_face(buffered=True), BATCH_SIZE, collate_fn=keep, **FRESH
    ),
    "streaming through a buffer, persistent": lambda: DataLoader(
        hugging_face(buffered=True), BATCH_SIZE, collate_fn=keep, **PERSISTENT
    ),
    "stateful streaming through a buffer": lambda: stateful(hugging_face(buffered=True)),
}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Loop:
    """A loop over one loader that can be left at any safe point and taken up by another."""

    def __init__(self, loader: Any, saved: dict[str, Any] | None = None) -> None:
        self.source = open_source(loader, "train")
        self.rng = RngState()
        self.saved = copy.deepcopy(saved)
        if self.saved is not None:
            self.source.load_state_dict(self.saved["data"])

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"data": self.source.state_dict(), "rng": self.rng.state_dict()})

    def run(self, stops: list[tuple[int, dict[str, Any]]] | None = None) -> list[Any]:
        seen: list[Any] = []
        while (epoch := position_of(self.source)[0]) < EPOCHS:
            if stops is not None and position_of(self.source)[1] == 0:
                stops.append((len(seen), self.state()))
            self.begin(epoch)
            while True:
                if stops is not None and self.source.batch and not self.source.used_up:
                    stops.append((len(seen), self.state()))
                try:
                    batch = self.source.next_batch()
                except StopIteration:
                    break
                seen.append((batch, random.random(), float(np.random.rand()), torch.rand(3)[0]))
            self.source.end_epoch()
        return seen

    def begin(self, epoch: int) -> None:
        saved, self.saved = self.saved, None
        if saved is not None and position_of(self.source)[1] == 0:
            self.rng.load_state_dict(saved["rng"])
            self.source.restore_generators()
        self.source.begin(epoch)
        if saved is not None and saved["data"]["batch"]:
            self.source.restore_generators()
            self.rng.load_state_dict(saved["rng"])


PARTS = ("loader", "rng", "place")


def uninterrupted(make: Callable[[], Any]) -> tuple[list[Any], list[tuple[int, dict[str, Any]]]]:
    seed_everything(1)
    stops: list[tuple[int, dict[str, Any]]] = []
    return Loop(make()).run(stops), stops


def continued(make: Callable[[], Any], saved: dict[str, Any]) -> list[Any]:
    seed_everything(1234)
    return Loop(make(), saved).run()


def stock(loader: Any) -> list[Any]:
    """What a loop without resumekit sees and draws."""
    seen = []
    for epoch in range(EPOCHS):
        if hasattr(getattr(loader, "dataset", None), "set_epoch"):
            loader.dataset.set_epoch(epoch)
        for batch in loader:
            seen.append((batch, random.random(), float(np.random.rand()), torch.rand(3)[0]))
    return seen


@pytest.mark.parametrize("kind", LOADERS)
def test_every_safe_point_continues_bit_for_bit(kind: str) -> None:
    make = LOADERS[kind]
    assert open_source(make(), "train").fidelity[0] is Fidelity.EXACT
    expected, stops = uninterrupted(make)
    assert len(expected) >= EPOCHS * 6
    if "workers" in kind or "persistent" in kind:
        per_epoch = len(stops) // EPOCHS
        stops = [stops[i] for i in (2, per_epoch + 2)]
    for used, saved in stops:
        assert continued(make, saved) == expected[used:], used


@pytest.mark.parametrize("kind", LOADERS)
def test_the_loop_draws_what_a_stock_loop_draws(kind: str) -> None:
    make = LOADERS[kind]
    expected, _ = uninterrupted(make)
    seed_everything(1)
    assert stock(make()) == expected


def test_used_samples_of_a_map_style_loader_are_passed_over_without_reading_them() -> None:
    _, stops = uninterrupted(LOADERS["map-style"])
    dataset = Noisy()
    loop = Loop(stateful(dataset, shuffle=True), stops[4][1])
    loop.begin(0)
    assert dataset.num_reads == 0


def test_a_stream_with_a_state_is_not_replayed() -> None:
    _, stops = uninterrupted(LOADERS["iterable with a state"])
    used, saved = stops[9]
    stream = StatefulStream()
    loop = Loop(stateful(stream), saved)
    loop.begin(saved["data"]["epoch"])
    assert (stream.position, stream.num_replayed) == (used * BATCH_SIZE - 2, 0)


@pytest.mark.parametrize(
    ("kind", "left_out"),
    [
        *((kind, part) for kind in ("own", "iterable with a state") for part in PARTS),
        *(("nodes with a generator", part) for part in (*PARTS, "start")),
    ],
)
def test_a_state_with_one_part_left_out_does_not_continue(kind: str, left_out: str) -> None:
    expected, stops = uninterrupted(LOADERS[kind])
    used, saved = stops[9]
    other = stops[2][1]
    if left_out == "rng":
        saved["rng"] = other["rng"]
    elif left_out in ("loader", "start"):
        saved["data"][left_out] = None
    else:
        saved["data"].update(epoch=other["data"]["epoch"], batch=other["data"]["batch"])
    assert continued(LOADERS[kind], saved) != expected[used:]


class ByNumber(OwnLoader):
    """Its state is a number of batches, of an order that is drawn when the epoch begins."""

    def __iter__(self) -> Iterator[Any]:
        used, self.used = self.used, 0
        for sample in torch.randperm(6).tolist():
            self.used += 1
            if self.used > used:
                yield sample, torch.rand(()).item()
        self.used = 0


class InItsFirstEpoch(OwnLoader):
    """Its state lacks the epoch."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": 0, "used": self.used}


class InPlace(OwnLoader):
    """It changes an array that is too large to be copied."""

    def __init__(self) -> None:
        super().__init__(knows_its_length=False)
        self.noise = np.zeros(2**17)

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.noise += 1
            yield batch, self.noise.sum()


class Hidden(Sampler[int]):
    """Draws from a generator that nobody sees."""

    def __iter__(self) -> Iterator[int]:
        yield from random.SystemRandom().sample(range(NUM_SAMPLES), NUM_SAMPLES)


class WithLock(OwnLoader):
    def __init__(self) -> None:
        super().__init__(knows_its_length=False)
        self.lock = threading.Lock()


class DrawsToContinue(OwnLoader):
    def __init__(self) -> None:
        super().__init__(knows_its_length=False)

    def __iter__(self) -> Iterator[Any]:
        torch.rand(())
        yield from super().__iter__()


UNVERIFIED: dict[str, tuple[Callable[[], Any], int, str]] = {
    "drawn": (lambda: ByNumber(knows_its_length=False), 0, "does not restore its next batch"),
    "epoch": (lambda: InItsFirstEpoch(knows_its_length=False), 1, "does not restore its next"),
    "draws": (DrawsToContinue, 0, "drew other random numbers"),
    "in place": (InPlace, 0, "read-only"),
    "lock": (WithLock, 0, "cannot pickle '_thread.lock' object"),
    "nodes": (lambda: of_nodes(Hidden()), 0, "of Loader does not restore its next batch"),
}


@pytest.mark.parametrize("kind", UNVERIFIED)
def test_a_state_that_does_not_continue_is_unknown_from_the_second_batch_on(kind: str) -> None:
    make, epoch, reason = UNVERIFIED[kind]
    seed_everything(1)
    loop = Loop(make())
    for number in range(epoch + 1):
        assert loop.source.fidelity[0] is Fidelity.EXACT
        loop.begin(number)
        for _ in range(2):
            loop.source.next_batch()
        if number < epoch:
            with suppress(StopIteration):
                while True:
                    loop.source.next_batch()
            loop.source.end_epoch()
    fidelity, found = loop.source.fidelity
    assert fidelity is Fidelity.UNKNOWN
    assert reason in found


def test_a_loader_is_not_changed_by_the_trial_on_a_copy() -> None:
    loader = InPlace()
    noise = loader.noise
    loop = Loop(loader)
    loop.begin(0)
    for number in range(1, 4):
        loop.source.next_batch()
        assert noise.max() == number


def test_a_loader_that_draws_to_continue_does_not_continue_exactly_as_its_condition_says() -> None:
    expected, stops = uninterrupted(DrawsToContinue)
    used, saved = stops[3]
    assert continued(DrawsToContinue, saved) != expected[used:]
    reason = open_source(DrawsToContinue(), "train").fidelity[1]
    assert "as long as it draws nothing to continue" in reason


def test_what_was_loaded_is_the_position_until_the_next_batch() -> None:
    expected, stops = uninterrupted(LateLoader)
    used, saved = stops[3]
    seed_everything(1234)
    loop = Loop(LateLoader(), saved)
    loop.begin(saved["data"]["epoch"])
    assert loop.state()["data"]["loader"] == saved["data"]["loader"]
    loader: Any = loop.source.loader
    assert loader.state_dict()["shards"]["epoch"] != saved["data"]["loader"]["shards"]["epoch"]
    assert continued(LateLoader, saved) == expected[used:]


@pytest.mark.parametrize("state", [True, 3, [], "epoch"])
def test_a_state_that_is_no_dict_is_refused_where_the_loader_gives_one(state: Any) -> None:
    _, stops = uninterrupted(LOADERS["own"])
    _, saved = stops[3]
    saved["data"]["loader"] = state
    with pytest.raises(DataPositionError, match=f"of type {type(state).__name__}"):
        continued(LOADERS["own"], saved)


def test_a_dataset_whose_place_its_loader_restores_is_saved_nowhere_else() -> None:
    loader = LateLoader()
    saved = open_source(loader, "train").saved_objects()
    assert [*map(id, saved)] == [id(loader), id(loader.dataset)]
    plain = DataLoader(Noisy())
    assert open_source(plain, "train").saved_objects() == (plain,)


def test_a_loader_that_was_never_iterated_is_not_asked_where_it_is() -> None:
    loader = LOADERS["iterable with a state"]()
    source = open_source(loader, "train")
    before = torch.get_rng_state()
    assert source.state_dict()["loader"] is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["map-style", "iterable", "iterable with a state"])
def test_the_users_loader_stays_as_it_is(kind: str) -> None:
    loader = LOADERS[kind]()
    Loop(loader).run()
    assert loader._iterator is None


def test_a_stream_of_datasets_is_not_trusted_with_its_own_position() -> None:
    for loader in (hugging_face(buffered=True), LOADERS["stateful streaming through a buffer"]()):
        source = open_source(loader, "train")
        assert isinstance(source, ReplaySource)
        assert source.fidelity[0] is Fidelity.EXACT


def test_torchdata_alone_does_not_continue_a_stream_that_draws() -> None:
    seed_everything(1)
    loader = stateful(NoisyStream())
    iterator = iter(loader)
    next(iterator)
    state, rng = loader.state_dict(), RngState().state_dict()
    expected = next(iterator)
    seed_everything(2)
    again = stateful(NoisyStream())
    again.load_state_dict(state)
    rest = iter(again)
    RngState().load_state_dict(rng)
    assert next(rest) != expected
