"""With keys, samples draw the same numbers in any worker, and the main process draws its own."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    MapDataPipe,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from resumekit.adapters.torch import Checkpointer
from resumekit.capture.rng import RngState
from resumekit.data.keyed import Keys, Purpose, RunSeed, index_bytes, seed_generators
from resumekit.data.loader_traits import nested_generators
from resumekit.data.position import DataPosition, open_source
from resumekit.errors import (
    ConfigurationError,
    DataPositionError,
    DriftError,
    InexactError,
    UnsupportedValueError,
)
from resumekit.serialization.digests import state_digest
from resumekit.state import Fidelity

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # two cores

EPOCHS = 2
BATCH_SIZE = 4
NUM_SAMPLES = 22  # the last batch of an epoch is a partial one
SEED = 2**63 + 11  # as large as torch.initial_seed() may be


def position_of(source: Any) -> tuple[int, int]:
    """Epoch and batch of the next batch; the end of an epoch is the start of the next one."""
    if source.epoch_batches and source.batch >= source.epoch_batches:
        return source.epoch + 1, 0
    return source.epoch, source.batch


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


class Noisy(Dataset[Any]):
    """Draws from all three global generators, more often for some samples than for others."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        for _ in range(index % 3):
            draw()
        return torch.tensor([index, *draw(), random.gauss(0, 1), np.random.normal()])


class InBatches(Noisy):
    """Gives whole batches."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list
        return [super(InBatches, self).__getitem__(index) for index in indices]


class Halves(Sampler[int]):
    """A user's sampler that draws the second half of its order when the first is used up."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(12).tolist()
        yield from (12 + self.rng.permutation(NUM_SAMPLES - 12)).tolist()

    def __len__(self) -> int:
        return NUM_SAMPLES


def noisy_collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, tuple[float, float, float]]:
    return torch.stack(samples), draw()


def with_replacement(data: Any) -> RandomSampler:
    return RandomSampler(
        data, replacement=True, num_samples=70, generator=torch.Generator().manual_seed(9)
    )


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(9)


LOADERS: dict[str, Callable[[Any], DataLoader[Any]]] = {
    "shuffled": lambda kw: DataLoader(Noisy(), BATCH_SIZE, shuffle=True, **kw),
    "with a generator": lambda kw: DataLoader(
        Noisy(), BATCH_SIZE, shuffle=True, generator=generator(), **kw
    ),
    "with replacement": lambda kw: DataLoader(
        Noisy(), BATCH_SIZE, sampler=with_replacement(Noisy()), **kw
    ),
    "weighted": lambda kw: DataLoader(
        Noisy(), BATCH_SIZE, sampler=WeightedRandomSampler([1.0] * NUM_SAMPLES, 18), **kw
    ),
    "drawing as it goes": lambda kw: DataLoader(Noisy(), BATCH_SIZE, sampler=Halves(), **kw),
    "drawing in collate": lambda kw: DataLoader(
        Noisy(), BATCH_SIZE, shuffle=True, collate_fn=noisy_collate, **kw
    ),
    "whole batches": lambda kw: DataLoader(
        InBatches(), batch_sampler=BatchSampler(RandomSampler(Noisy()), 4, drop_last=True), **kw
    ),
    "a subset": lambda kw: DataLoader(
        Subset(Noisy(), range(3, 20)), BATCH_SIZE, shuffle=True, **kw
    ),
    "one by one": lambda kw: DataLoader(Noisy(), batch_size=None, sampler=Halves(), **kw),
    "batches by the sampler": lambda kw: DataLoader(
        Several(), batch_size=None, sampler=BatchSampler(RandomSampler(Noisy()), 4, False), **kw
    ),
}


class Several(Noisy):
    """Takes a list of indices as one index."""

    def __getitem__(self, index: Any) -> Any:
        return torch.stack([super(Several, self).__getitem__(each) for each in index])


def workers(number: int, **more: Any) -> dict[str, Any]:
    return {"num_workers": number, **more}


PERSISTENT = {"persistent_workers": True}


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Loop:
    """A loop over one loader that can be left at any safe point and taken up by another."""

    def __init__(
        self, loader: DataLoader[Any], saved: dict[str, Any] | None = None, *, keyed: bool = True
    ) -> None:
        seed = RunSeed() if keyed else None
        if seed is not None:
            seed.load_state_dict({"seed": SEED})
        self.position = DataPosition(seed, allowed_changes={"batch_size"})
        self.rng = RngState()
        self.saved = saved
        if saved is not None:
            self.position.load_state_dict(saved["data"])
        self.source = self.position.open(loader, "train")
        self.seen: list[Any] = []

    def state(self) -> dict[str, Any]:
        return copy.deepcopy({"data": self.position.state_dict(), "rng": self.rng.state_dict()})

    def run(self, *, stop_after: int | None = None) -> dict[str, Any]:
        """Trains on; gives the state at the safe point where it stops."""
        while position_of(self.source)[0] < EPOCHS and len(self.seen) != stop_after:
            if not self.source.begun:
                self.begin()
            # What a training step does to the random state, and what it saw.
            self.seen.append((as_lists(self.source.next_batch()), self.source.indices, draw()))
            if self.source.used_up:
                with pytest.raises(StopIteration):
                    self.source.next_batch()
                self.source.end_epoch()
        return self.state()

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


def as_lists(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.tolist()
    return [as_lists(part) for part in batch] if isinstance(batch, (list, tuple)) else batch


def run_through(kind: str, settings: dict[str, Any], *, keyed: bool = True) -> list[Any]:
    seed_everything(1)
    loop = Loop(LOADERS[kind](settings), keyed=keyed)
    loop.run()
    return loop.seen


def relay(kind: str, legs: list[tuple[int, dict[str, Any]]], *, keyed: bool = True) -> list[Any]:
    """A run interrupted after so many batches in each leg, with other workers in the next."""
    seen, saved = [], None
    for number, (length, settings) in enumerate(legs):
        seed_everything(1 if saved is None else 100 + number)
        loop = Loop(LOADERS[kind](settings), saved, keyed=keyed)
        saved = loop.run(stop_after=length)
        seen += loop.seen
        del loop  # its workers end with it, as if the process had been killed
    return seen


LEGS = [
    (2, workers(0)),
    (2, workers(2)),
    (3, workers(3, **PERSISTENT)),
    (1, workers(1)),
    (-1, workers(0)),
]


@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_continues_bit_for_bit_with_other_workers_at_every_launch(kind: str) -> None:
    assert relay(kind, LEGS) == run_through(kind, workers(0))


# torchdata 0.11 stateful_dataloader.py calls what torch 2.13 deprecates, in every constructor.
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_so_does_a_loader_of_torchdata(monkeypatch: pytest.MonkeyPatch) -> None:
    torchdata = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata is not installed: pip install torchdata"
    )

    def stateful(settings: dict[str, Any]) -> Any:
        return torchdata.StatefulDataLoader(Noisy(), BATCH_SIZE, shuffle=True, **settings)

    monkeypatch.setitem(LOADERS, "stateful", stateful)
    assert relay("stateful", LEGS) == run_through("stateful", workers(0))


def test_with_the_tape_other_workers_give_other_numbers() -> None:
    legs = [(2, workers(0)), (-1, workers(2))]
    assert relay("shuffled", legs, keyed=False) != run_through("shuffled", workers(0), keyed=False)


@pytest.mark.parametrize("kind", ["shuffled", "with a generator", "drawing as it goes"])
@pytest.mark.parametrize("position", [1, 4, 5, 6, 8, 10])
def test_every_kind_of_position_continues_without_workers(kind: str, position: int) -> None:
    legs = [(position, workers(0)), (-1, workers(0))]
    assert relay(kind, legs) == run_through(kind, workers(0))


@pytest.mark.parametrize("more", [{}, PERSISTENT, {"prefetch_factor": 5}])
@pytest.mark.parametrize("kind", ["with a generator", "drawing as it goes"])
def test_neither_workers_nor_prefetching_change_a_number(kind: str, more: dict[str, Any]) -> None:
    assert run_through(kind, workers(2, **more)) == run_through(kind, workers(0))


@pytest.mark.parametrize("kind", ["with replacement", "drawing as it goes"])
def test_what_equal_runs_have_in_common_does_not_depend_on_workers(kind: str) -> None:
    def common(loop: Loop) -> str:
        return state_digest(loop.position.comparable_state())

    def states(number: int) -> list[str]:
        seed_everything(1)
        loop, found = Loop(LOADERS[kind](workers(number))), []
        while position_of(loop.source)[0] < EPOCHS:
            loop.run(stop_after=len(loop.seen) + 1)
            found.append(common(loop))
        return found

    expected = states(0)
    assert len(set(expected)) == len(expected)
    assert states(2) == states(3) == expected
    saved, used = None, 0
    for length, settings in LEGS:
        seed_everything(used + 1)
        loop = Loop(LOADERS[kind](settings), saved)
        saved = loop.run(stop_after=length)
        used += len(loop.seen)
        assert common(loop) == expected[used - 1], used


@pytest.mark.parametrize("left_out", ["seed", "start", "rng"])
def test_a_state_with_one_part_left_out_does_not_continue(left_out: str) -> None:
    expected = run_through("shuffled", workers(0))
    seed_everything(1)
    saved = Loop(LOADERS["shuffled"](workers(0))).run(stop_after=8)
    seed_everything(100)
    if left_out == "rng":
        saved["rng"] = RngState().state_dict()
    if left_out == "start":
        other = RngState().state_dict()
        saved["data"]["train"]["start"] = {"at_iter": other, "at_first": other}
        with pytest.raises(DataPositionError, match="another order"):
            Loop(LOADERS["shuffled"](workers(0)), saved).run()
        return
    loop = Loop(LOADERS["shuffled"](workers(0)), saved)
    if left_out == "seed":
        loop.position._seed.load_state_dict({"seed": SEED + 1})  # type: ignore[union-attr]
    loop.run()
    assert loop.seen != expected[8:]
    assert [indices for _, indices, _ in loop.seen] == [indices for _, indices, _ in expected[8:]]


# ---------------------------------------------------------------- the main process's numbers


class Silent(Noisy):
    """Draws nothing."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


def stock(loader: DataLoader[Any]) -> list[Any]:
    """What a loop draws that knows nothing of us."""
    seed_everything(1)
    return [(as_lists(batch), draw()) for _ in range(EPOCHS) for batch in loader]


@pytest.mark.parametrize("number", [0, 2])
def test_the_main_process_draws_what_it_would_draw_were_the_samples_silent(number: int) -> None:
    keyed = run_through("with a generator", workers(number))
    silent = stock(
        DataLoader(Silent(), BATCH_SIZE, shuffle=True, generator=generator(), num_workers=number)
    )
    assert [(indices, drawn) for _, indices, drawn in keyed] == silent


def test_with_fresh_workers_the_main_process_draws_what_it_draws_in_a_stock_loop() -> None:
    keyed = run_through("shuffled", workers(2))
    drawn = [drawn for _, drawn in stock(LOADERS["shuffled"](workers(2)))]
    assert [drawn for *_, drawn in keyed] == drawn


def test_a_half_of_a_pair_of_normal_numbers_is_restored_too() -> None:
    loop = Loop(LOADERS["shuffled"](workers(0)))
    loop.begin()
    seed_everything(3)
    expected = [random.gauss(0, 1) for _ in range(2)], np.random.normal(size=2).tolist()
    seed_everything(3)
    first = random.gauss(0, 1), np.random.normal()
    before = RngState().state_dict()
    loop.source.next_batch()
    assert str(RngState().state_dict()) == str(before)
    second = random.gauss(0, 1), np.random.normal()
    assert (list(zip(first, second, strict=True))) == [tuple(each) for each in expected]


def test_the_generators_are_restored_when_a_sample_fails() -> None:
    class Fails(Noisy):
        def __getitem__(self, index: int) -> Any:
            draw()
            raise ValueError(index)

    loop = Loop(DataLoader(Fails(), BATCH_SIZE))
    loop.begin()
    before = RngState().state_dict()
    with pytest.raises(ValueError, match="0"):
        loop.source.next_batch()
    assert str(RngState().state_dict()) == str(before)


# ---------------------------------------------------------------- what a key is made of


def values(seen: list[Any]) -> dict[tuple[int, int], Any]:
    """What each sample drew, by position of the step and index."""
    return {
        (step, int(sample[0])): tuple(sample[1:])
        for step, (batch, *_) in enumerate(seen)
        for sample in batch
    }


def test_no_two_samples_epochs_or_loaders_draw_the_same_numbers() -> None:
    drawn = list(values(run_through("shuffled", workers(0))).values())
    other = Loop(LOADERS["shuffled"](workers(0)))
    other.source.name = "other"
    other.run()
    drawn += values(other.seen).values()
    numbers = [number for sample in drawn for number in sample]
    assert len(drawn) == 2 * EPOCHS * NUM_SAMPLES
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("data", [Noisy(), Subset(Subset(Noisy(), range(9)), range(2, 7))])
def test_a_sample_draws_the_same_numbers_in_batches_of_any_size_and_make(data: Any) -> None:
    def in_batches(size: int) -> dict[int, Any]:
        loop = Loop(DataLoader(data, size, shuffle=True))
        loop.run(stop_after=len(loop.source.loader))
        return {index: drawn for (_, index), drawn in values(loop.seen).items()}

    assert in_batches(2) == in_batches(7)


def test_a_sample_draws_the_same_numbers_when_the_batch_size_changes_inside_an_epoch() -> None:
    def loader(size: int, number: int) -> DataLoader[Any]:
        return DataLoader(Noisy(), size, shuffle=True, num_workers=number)

    def drawn(*loops: Loop) -> dict[int, Any]:
        return {index: each for loop in loops for (_, index), each in values(loop.seen).items()}

    whole, first = Loop(loader(4, 0)), Loop(loader(4, 1))
    for loop, length in ((whole, 6), (first, 2)):
        seed_everything(1)
        saved = loop.run(stop_after=length)
    rest = Loop(loader(2, 0), saved)
    rest.run(stop_after=7)
    assert drawn(first, rest) == drawn(whole)
    assert len(drawn(first)) + len(drawn(rest)) == NUM_SAMPLES


def test_a_generator_made_again_from_the_initial_seed_is_keyed_as_well() -> None:
    class Modern(Noisy):
        def __getitem__(self, index: int) -> Any:
            rng = np.random.default_rng(torch.initial_seed())
            return torch.tensor([index, rng.random()])

    def drawn(number: int) -> list[float]:
        loop = Loop(DataLoader(Modern(), BATCH_SIZE, num_workers=number))
        loop.run(stop_after=6)
        assert loop.position.fidelity == (Fidelity.EXACT, "")
        return [sample[1] for batch, *_ in loop.seen for sample in batch]

    assert drawn(0) == drawn(2)
    assert len(set(drawn(0))) == NUM_SAMPLES


@pytest.mark.parametrize("kind", [Noisy, InBatches])
def test_what_collating_draws_does_not_depend_on_what_its_samples_drew(kind: Any) -> None:
    def collated(data: Any) -> list[Any]:
        loop = Loop(DataLoader(data, BATCH_SIZE, collate_fn=noisy_collate))
        loop.run()
        return [drawn for (_, drawn), *_ in loop.seen]

    assert collated(kind()) == collated(Silent())
    assert len({str(drawn) for drawn in collated(kind())}) == 2 * 6


def test_an_index_that_comes_twice_in_an_epoch_draws_other_numbers_the_second_time() -> None:
    loader = DataLoader(Noisy(), 2, sampler=[5, 5, 3, 5, 3, 5])
    loop = Loop(loader)
    loop.run()
    first, second = loop.seen[:3], loop.seen[3:]
    drawn = [tuple(sample) for batch, *_ in first + second for sample in batch]
    assert len(set(drawn)) == len(drawn)
    again = Loop(loader)
    resumed = Loop(loader, again.run(stop_after=2))
    resumed.run()
    assert [batch for batch, *_ in again.seen + resumed.seen] == [batch for batch, *_ in loop.seen]


def test_the_three_generators_are_seeded_apart() -> None:
    seed_generators(Keys(1, "train").key(Purpose.SAMPLE, 0, b"5,"))
    drawn = [random.random(), float(np.random.rand()), torch.rand((), dtype=torch.float64).item()]
    assert len({round(number, 6) for number in drawn}) == 3


def test_keys_are_the_same_in_every_version() -> None:
    # A checkpoint is continued by later versions: these numbers must never change.
    key = Keys(2**64 - 1, "train").key(Purpose.SAMPLE, 3, index_bytes(17))
    assert key.hex() == PINNED_KEY
    seed_generators(key)
    assert (random.getrandbits(32), int(np.random.randint(2**31)), torch.initial_seed()) == PINNED


PINNED_KEY = "52073b2438b0313a49151309bc30e896b23c459351cfd489e83f8778"
PINNED = (405846377, 350513887, 8684980674384678737)

INDICES = [
    *(0, 1, -1, 10**30, "", "1", "1,", b"1", 1.0, 0.5, None, (), (1, 2), ((1,), 2), (1, (2,))),
    *((1, 23), (12, 3), {"i": 1}, {"i": 2}, slice(1, 2), slice(1, 2, 1), "ä", "\udc80"),
]


def test_every_index_has_bytes_of_its_own_and_equal_numbers_have_equal_ones() -> None:
    assert len({index_bytes(index) for index in INDICES}) == len(INDICES)
    alike: list[Any] = [7, np.int64(7), np.uint8(7), torch.tensor(7)]
    assert len({index_bytes(index) for index in alike}) == 1
    assert index_bytes([1, 2]) == index_bytes(np.array([1, 2])) == index_bytes((1, 2))


def test_an_index_without_bytes_of_its_own_is_refused_with_its_name() -> None:
    with pytest.raises(UnsupportedValueError, match="gives a Silent as the index of a sample"):
        index_bytes(Silent())


# ---------------------------------------------------------------- what the user's code sees


class Looks(Dataset[Any]):
    """Looks around in its worker."""

    def __init__(self) -> None:
        self.prepared_by: int | None = None
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 8

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return torch.tensor([self.prepared_by, self.epochs[-1], len(self.epochs)])


def prepare(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert type(info.dataset) is Looks
    info.dataset.prepared_by = worker_id


def test_workers_see_the_dataset_itself_and_persistent_ones_hear_of_a_new_epoch() -> None:
    data = Looks()
    loader = DataLoader(data, 4, num_workers=2, persistent_workers=True, worker_init_fn=prepare)
    loop = Loop(loader)
    loop.run()
    assert [batch[0] for batch, *_ in loop.seen] == [[0, 0, 1], [1, 0, 1], [0, 1, 2], [1, 1, 2]]
    assert data.epochs == [0, 1]


class UserBatch(list[Any]):
    """A user's batch."""


def test_a_batch_is_what_the_collate_function_made() -> None:
    for number in (0, 1):
        loop = Loop(DataLoader(Silent(), 4, collate_fn=UserBatch, num_workers=number))
        loop.begin()
        batch = loop.source.next_batch()
        assert type(batch) is UserBatch
        assert as_lists(list(batch)) == [0, 1, 2, 3]
        assert loop.source.indices == [0, 1, 2, 3]
        assert type(loop.source.indices) is list


def test_the_users_loader_stays_as_it_is() -> None:
    loader = LOADERS["with a generator"](workers(1))
    before = dict(vars(loader))
    Loop(loader).run(stop_after=2)
    assert vars(loader) == before


# ---------------------------------------------------------------- what keys do not reach


class Private(Noisy):
    """Holds a generator of its own somewhere below."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.transforms = [{"jitter": lambda x, rng=rng: x + rng.random()}]


class Lazy(Noisy):
    """Makes a generator of its own in the worker."""

    rng: random.Random | None = None

    def __getitem__(self, index: int) -> Any:
        if self.rng is None:
            self.rng = random.Random(1)
        return torch.tensor(index)


def fidelity(loader: Any, *, keyed: bool = True) -> tuple[Fidelity, str]:
    loop = Loop(loader, keyed=keyed)
    loop.run(stop_after=1)
    return loop.position.fidelity


def test_everything_that_keys_reach_is_exact() -> None:
    for settings in (workers(0), workers(2), workers(1, **PERSISTENT)):
        assert fidelity(LOADERS["drawing in collate"](settings)) == (Fidelity.EXACT, "")
    assert fidelity(LOADERS["one by one"](workers(2))) == (Fidelity.EXACT, "")


@pytest.mark.parametrize("number", [0, 1])
def test_private_generators_of_a_dataset_are_lost_however_deep_they_are(number: int) -> None:
    word, reason = fidelity(DataLoader(Private(), num_workers=number))
    assert word is Fidelity.LOST
    assert "dataset.transforms.0.jitter.defaults.0" in reason
    assert "draw from random, numpy.random or torch" in reason


def test_a_private_generator_that_only_the_worker_made_is_reported_with_its_first_batch() -> None:
    word, reason = fidelity(DataLoader(Lazy(), 4, num_workers=1))
    assert (word, "dataset.rng" in reason) == (Fidelity.LOST, True)


def test_a_private_generator_that_the_checkpoint_holds_is_restored_without_workers() -> None:
    data = Silent()
    data.rng = random.Random(1)  # type: ignore[attr-defined]
    assert fidelity(DataLoader(data)) == (Fidelity.EXACT, "")
    assert fidelity(DataLoader(data, num_workers=1))[0] is Fidelity.LOST


def test_generators_are_found_in_code_and_the_global_ones_are_not_private() -> None:
    hidden = random.Random(3)

    def collate(samples: Any) -> Any:
        return default_collate(samples) + hidden.random()

    class Calls:
        rng = np.random.RandomState(4)

        def __getitem__(self, index: int) -> Any:
            return helper(index)

    found = nested_generators({"collate_fn": collate, "dataset": Calls()})
    assert set(found) == {"collate_fn.hidden", "dataset.rng", "dataset.__getitem__.helper.SHARED"}
    public = {"random": random.uniform, "torch": torch.default_generator, "numpy": np.random.rand}
    assert nested_generators({"dataset": [public, np.random.mtrand._rand, random.random]}) == {}


SHARED = torch.Generator()


def helper(index: int) -> Any:
    return torch.rand(index, generator=SHARED)


def test_an_order_that_no_record_can_repeat_is_lost_with_keys_too() -> None:
    word, reason = fidelity(DataLoader(Noisy(), num_workers=2, in_order=False))
    assert (word, "in_order=False" in reason) == (Fidelity.LOST, True)


def test_around_a_loader_with_keys_the_reason_is_that_of_the_loader_inside() -> None:
    class Outer(DataLoader[Any]):
        def __init__(self, inner: DataLoader[Any]) -> None:
            super().__init__(inner.dataset)
            self.base_dataloader = inner

    loader = DataLoader(Noisy(), num_workers=2, in_order=False)
    position = DataPosition(RunSeed())
    assert position.open(Outer(loader), "train").keyed
    assert position.fidelity == fidelity(loader)


def test_a_stream_is_reported_as_before_and_that_no_key_reaches_it() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(9)

    word, reason = DataPosition(RunSeed()).fidelity
    assert (word, reason) == (Fidelity.EXACT, "")
    position = DataPosition(RunSeed())
    source = position.open(DataLoader(Stream()), "train")
    assert not source.keyed
    tape = open_source(DataLoader(Stream()), "train").fidelity
    word, reason = position.fidelity
    assert word is tape[0]
    if word is not Fidelity.EXACT:
        assert reason.startswith(tape[1])
        assert "randomness='keyed' does not reach it: a stream has no indices" in reason


def test_a_pipe_is_refused_with_its_name() -> None:
    class Pipe(MapDataPipe[int]):
        def __getitem__(self, index: int) -> int:
            return index

        def __len__(self) -> int:
            return 3

    with pytest.raises(ConfigurationError, match="a MapDataPipe and randomness='keyed'"):
        Loop(DataLoader(Pipe()))


def test_what_the_tape_loses_and_keys_do_not_names_them() -> None:
    for keyed, expected in ((False, Fidelity.EQUIVALENT), (True, Fidelity.EXACT)):
        saved = Loop(LOADERS["shuffled"](workers(0)), keyed=keyed).run(stop_after=2)
        word, reason = Loop(LOADERS["shuffled"](workers(2)), saved, keyed=keyed).position.fidelity
        assert word is expected
        assert ("num_workers was 0 and is 2" in reason) == (not keyed)
        assert ("randomness='keyed'" in reason) == (not keyed)


# ---------------------------------------------------------------- a whole run


def train(directory: Path, *, stop_after: int | None = None, seed: int = 0, **options: Any) -> list:
    torch.manual_seed(seed)
    number, order = options.pop("num_workers", 0), options.pop("generator", None)
    data = options.pop("data", Noisy())
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # The judge's losses of a launch are no state of the loop.
    transient = {"losses", "stop_after"}
    settings = {"save_every": 2, "randomness": "keyed", "transient": transient, **options}
    losses = []
    with Checkpointer(directory, model=model, optimizer=optimizer, **settings) as run:
        loader = DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=number, generator=order)
        for batch in run.batches(loader, epochs=EPOCHS):
            loss = model(nn.functional.dropout(batch.float().view(-1, 6))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()).hex())
            run.step(loss=loss)
            if run.progress.step == stop_after:
                run._run.close()
                return losses
    return losses


def test_the_seed_of_the_first_start_stays_the_runs(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", seed=5)
    train(tmp_path / "run", seed=5, stop_after=5)
    assert train(tmp_path / "run", seed=6, num_workers=2) == whole[4:]
    assert train(tmp_path / "other", seed=6) != whole


@pytest.mark.parametrize(("then", "now"), [(2, 0), (0, 2)])
def test_a_loaders_generator_continues_although_the_user_named_it(
    tmp_path: Path, then: int, now: int
) -> None:
    # Two steps before the end of an epoch workers have come to it, where torch draws once more.
    def trained(name: str, num_workers: int, **more: Any) -> list[str]:
        order = generator()
        named: dict[str, Any] = {"generators": {"mine": order}, "generator": order}
        return train(tmp_path / name, num_workers=num_workers, save_every=4, **named, **more)

    whole = trained("whole", then)
    trained("run", then, stop_after=5)
    assert trained("run", now) == whole[4:]


@pytest.mark.parametrize(("then", "now"), [("tape", "keyed"), ("keyed", "tape")])
def test_a_checkpoint_of_the_other_mode_is_refused_and_both_are_named(
    tmp_path: Path, then: str, now: str
) -> None:
    train(tmp_path, randomness=then, stop_after=3)
    with pytest.raises(DriftError, match=f"'{now}', expected '{then}', as in the checkpoint"):
        train(tmp_path, randomness=now)


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'tape' or 'keyed'"):
        train(tmp_path, randomness="dice")


def test_a_strict_run_ends_when_a_worker_finds_what_no_key_reaches(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Late(Noisy):
        rng: random.Random | None = None

        def __getitem__(self, index: int) -> Any:
            self.rng = self.rng or random.Random(1)
            return super().__getitem__(index)

    train(tmp_path / "reported", data=Late(), num_workers=1)
    assert capfd.readouterr().err.count("no key reaches dataset.rng") == 1
    with pytest.raises(InexactError, match=r"no key reaches dataset\.rng"):
        train(tmp_path / "strict", data=Late(), num_workers=1, strict=True)
