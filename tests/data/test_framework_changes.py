"""An epoch that one framework began continues under another one, in the order that it had there.

A framework's loader is one that holds a DataLoader and is some batches ahead of what it hands out.
"""

from __future__ import annotations

import copy
import random
from collections import deque
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
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from resumekit.capture.rng import RngState
from resumekit.data import ResumableSampler
from resumekit.data.keyed import RunSeed
from resumekit.data.position import DataPosition, open_source
from resumekit.errors import DataPositionError
from resumekit.state import Fidelity, WorldChange

EPOCHS = 3
LENGTH = 22
BATCH_SIZE = 4  # the last batch of an epoch is a partial one
PER_EPOCH = 6


def position_of(source: Any) -> tuple[int, int]:
    """Epoch and batch of the next batch; the end of an epoch is the start of the next one."""
    if source.epoch_batches and source.batch >= source.epoch_batches:
        return source.epoch + 1, 0
    return source.epoch, source.batch


class Numbers(Dataset[Any]):
    """Gives back the index."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return (index,)


class Even(Numbers):
    """The last batch of an epoch is a full one; only the end that follows shows it was the last."""

    def __init__(self) -> None:
        super().__init__(LENGTH + 2)


class Noisy(Numbers):
    """Draws from all three global generators."""

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), torch.rand(()).item()


class WithGenerator(Numbers):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(3)

    def __getitem__(self, index: int) -> Any:
        return index, float(self.rng.random())


class UserSampler(Sampler[int]):
    """A user's sampler with a generator of its own."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.rng = np.random.default_rng(7)

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(np.arange(1, self.length, 2)).tolist()
        yield from self.rng.permutation(np.arange(0, self.length, 2)).tolist()

    def __len__(self) -> int:
        return self.length


class AsItGoes(UserSampler):
    """The same, and it draws each index from NumPy's generator when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.length))
        while left:
            yield left.pop(np.random.randint(len(left)))


class FetchesAhead:
    """The shape of a framework's loader: it holds another and is ``depth`` batches ahead."""

    def __init__(self, inner: Any, depth: int = 1) -> None:
        self.base_dataloader = inner
        self.depth = depth

    def __getattr__(self, name: str) -> Any:
        if name == "base_dataloader":
            raise AttributeError(name)
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def __iter__(self) -> Iterator[Any]:
        waiting: deque[Any] = deque()
        for batch in self.base_dataloader:
            waiting.append(batch)
            if len(waiting) > self.depth:
                yield waiting.popleft()
        yield from waiting


def distributed(data: Any) -> DistributedSampler[Any]:
    return DistributedSampler(data, num_replicas=1, rank=0, seed=3)


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "random": RandomSampler,
    "generator": lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(5)),
    "in order": SequentialSampler,
    "distributed": distributed,
    "resumable": lambda data: ResumableSampler(data, seed=3),
    "own": lambda data: UserSampler(len(data)),
    "as it goes": lambda data: AsItGoes(len(data)),
    "weighted": lambda data: WeightedRandomSampler([1.0] * len(data), len(data)),
}

Make = Callable[[], Any]


def plain(sampler: str = "random", data: type[Numbers] = Numbers, workers: int = 0) -> Make:
    """Makes a DataLoader."""

    def make() -> DataLoader[Any]:
        given = data()
        return DataLoader(given, BATCH_SIZE, sampler=SAMPLERS[sampler](given), num_workers=workers)

    return make


def prepared(
    sampler: str = "random", data: type[Numbers] = Numbers, workers: int = 0, depth: int = 1
) -> Make:
    """Makes a framework's loader around one."""
    return lambda: FetchesAhead(plain(sampler, data, workers)(), depth)


def train(
    make: Make,
    saved: dict[str, Any] | None = None,
    *,
    epochs: int = EPOCHS,
    seed: RunSeed | None = None,
) -> tuple[list[Any], list[dict[str, Any]], DataPosition]:
    """What every step saw and drew, the state at every safe point, and the position."""
    seed_everything(0 if saved is None else 100)
    position, rng = DataPosition(seed), RngState({})
    if saved is not None:
        position.load_state_dict(copy.deepcopy(saved["data"]))
    source = position.open(make(), "train")
    seen: list[Any] = []
    stops: list[dict[str, Any]] = []
    while position_of(source)[0] < epochs:
        epoch, number = position_of(source)
        if saved is not None and number == 0:
            rng.load_state_dict(saved["rng"])
            source.restore_generators()
        source.begin(epoch)
        if saved is not None and number > 0:
            source.restore_generators()
            rng.load_state_dict(saved["rng"])
        saved = None
        while not source.used_up:
            batch = source.next_batch()
            drawn = (random.random(), float(np.random.rand()), torch.rand(()).item())
            seen.append(([part.tolist() for part in batch], drawn))
            if not source.used_up:
                stops.append(current(position, rng))
        with pytest.raises(StopIteration):
            source.next_batch()
        source.end_epoch()
        stops.append(current(position, rng))
    return seen, stops, position


def current(position: DataPosition, rng: RngState) -> dict[str, Any]:
    return copy.deepcopy({"data": position.state_dict(), "rng": rng.state_dict()})


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def indices(seen: list[Any]) -> list[int]:
    return [index for batch, _ in seen for index in batch[0]]


def batches(seen: list[Any]) -> list[Any]:
    return [batch for batch, _ in seen]


# ---------------------------------------------------------------- the same sampler in both


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize(
    "sampler", ["random", "generator", "in order", "distributed", "resumable", "own"]
)
def test_where_samples_draw_nothing_the_run_continues_bit_for_bit(sampler: str, depth: int) -> None:
    alone, ahead = plain(sampler), prepared(sampler, depth=depth)
    seen, stops, _ = train(alone)
    others, others_stops, _ = train(ahead)
    assert others == seen  # what a framework fetches ahead draws nothing here
    for number in (1, 3, 5, 6, 8, 12, 17):
        assert train(ahead, stops[number - 1])[0] == seen[number:], number
        assert train(alone, others_stops[number - 1])[0] == seen[number:], number


@pytest.mark.parametrize("sampler", ["random", "own", "as it goes"])
def test_what_was_fetched_ahead_is_fetched_again_from_where_it_was(sampler: str) -> None:
    for depth in (1, 2):
        seen, stops, _ = train(prepared(sampler, Noisy, depth=depth))
        for number in (2, 9):
            again = train(plain(sampler, Noisy), stops[number - 1])[0]
            assert batches(again[:depth]) == batches(seen[number : number + depth])
            assert batches(again[depth:]) != batches(seen[number + depth :])  # at other moments
            epoch, batch = divmod(number, PER_EPOCH)
            used = indices(seen[epoch * PER_EPOCH : number])
            rest = indices(again)[: LENGTH - batch * BATCH_SIZE]
            assert sorted(used + rest) == list(range(LENGTH))


@pytest.mark.parametrize("sampler", ["random", "own", "as it goes"])
def test_the_first_batch_of_a_framework_is_the_one_that_was_next(sampler: str) -> None:
    seen, stops, _ = train(plain(sampler, Noisy))
    for number in (2, 9):
        again = train(prepared(sampler, Noisy), stops[number - 1])[0]
        assert batches(again[:1]) == batches(seen[number : number + 1])
        if sampler != "as it goes":
            left = LENGTH - number % PER_EPOCH * BATCH_SIZE
            assert indices(again)[:left] == indices(seen[number:])[:left]


def test_a_generator_of_the_dataset_continues() -> None:
    for first, then in (
        (plain(data=WithGenerator), prepared(data=WithGenerator)),
        (prepared(data=WithGenerator), plain(data=WithGenerator)),
    ):
        seen, stops, _ = train(first)
        for number in (2, 9):
            assert train(then, stops[number - 1])[0] == seen[number:]


def test_the_random_numbers_of_workers_continue() -> None:
    alone, ahead = plain(data=Noisy, workers=2), prepared(data=Noisy, workers=2)
    seen, stops, _ = train(alone)
    others, others_stops, _ = train(ahead)
    assert others == seen
    rest, _, position = train(ahead, stops[7])
    assert rest == seen[8:]
    assert position.fidelity == (Fidelity.EXACT, "")
    assert train(alone, others_stops[7])[0] == seen[8:]


def test_with_keys_samples_draw_the_same_numbers() -> None:
    def seed() -> RunSeed:
        keys = RunSeed()
        keys.value = 5
        return keys

    alone, ahead = plain(data=Noisy), prepared(data=Noisy)
    seen, stops, _ = train(alone, seed=seed())
    others, others_stops, _ = train(ahead, seed=seed())
    assert others == seen
    rest, _, position = train(ahead, stops[7], seed=seed())
    assert rest == seen[8:]
    assert position.fidelity == (Fidelity.EXACT, "")
    assert train(alone, others_stops[7], seed=seed())[0] == seen[8:]


def test_without_keys_and_workers_it_is_equivalent_and_reported() -> None:
    for first, then in ((plain(), prepared()), (prepared(), plain())):
        _, stops, _ = train(first, epochs=1)
        _, _, position = train(then, stops[2])
        fidelity, reason = position.fidelity
        assert fidelity is Fidelity.EQUIVALENT
        assert "fetches batches at other moments" in reason
        assert "exact with randomness='keyed'" in reason
        _, _, position = train(then, stops[-1])  # the start of an epoch
        assert position.fidelity == (Fidelity.EXACT, "")


@pytest.mark.parametrize("data", [Numbers, Even])
@pytest.mark.parametrize("sampler", ["random", "generator", "own"])
def test_at_the_end_of_an_epoch_that_nobody_has_seen_the_next_one_is_the_same(
    sampler: str, data: type[Numbers]
) -> None:
    def begun(make: Make, saved: Any = None) -> tuple[Any, Any]:
        seed_everything(0 if saved is None else 100)
        position, rng = DataPosition(), RngState({})
        position.load_state_dict({} if saved is None else copy.deepcopy(saved["data"]))
        source = position.open(make(), "train")
        source.begin(0)
        if saved is not None:
            source.restore_generators()
            rng.load_state_dict(saved["rng"])
        while not source.used_up:
            source.next_batch()
        return source, current(position, rng)

    def next_epoch(source: Any) -> list[int]:
        with pytest.raises(StopIteration):
            source.next_batch()
        source.end_epoch()
        source.begin(1)
        found = [source.next_batch()[0].tolist() for _ in range(PER_EPOCH)]
        return [index for batch in found for index in batch]

    makes = (plain(sampler, data), prepared(sampler, data))
    expected = next_epoch(begun(makes[0])[0])
    for make in makes:
        state = begun(make)[1]
        assert state["data"]["train"]["batch"] == PER_EPOCH
        for other in makes:
            assert next_epoch(begun(other, state)[0]) == expected


# ---------------------------------------------------------------- each draws in its own way

PAIRS = [
    ("random", "distributed"),
    ("distributed", "random"),
    ("random", "generator"),
    ("generator", "random"),
    ("random", "resumable"),
    ("resumable", "random"),
    ("in order", "random"),
    ("generator", "distributed"),
]


@pytest.mark.parametrize(("first", "then"), PAIRS)
@pytest.mark.parametrize("way", ["in", "out"])
def test_the_order_that_was_drawn_continues_and_the_next_one_is_drawn_by_the_other(
    way: str, first: str, then: str
) -> None:
    makes = [plain(first), prepared(then)] if way == "in" else [prepared(first), plain(then)]
    seen, stops, _ = train(makes[0])
    for number in (1, 3, 5, 8):
        rest, _, position = train(makes[1], stops[number - 1])
        epoch, batch = divmod(number, PER_EPOCH)
        left = LENGTH - batch * BATCH_SIZE
        assert indices(rest)[:left] == indices(seen[number:])[:left]
        later = indices(rest)[left:]
        for first_of_epoch in range(0, len(later), LENGTH):
            assert sorted(later[first_of_epoch : first_of_epoch + LENGTH]) == list(range(LENGTH))
        if then in ("distributed", "resumable"):
            sampler = SAMPLERS[then](Numbers())
            sampler.set_epoch(epoch + 1)
            assert later[:LENGTH] == list(sampler)
        (change,) = position.changes
        assert (
            f"train: epoch {epoch} continues at sample {batch * BATCH_SIZE} in the order" in change
        )


def test_there_and_back_and_killed_again_each_sample_comes_once() -> None:
    out = [prepared("distributed"), prepared("distributed"), plain("random")]
    chains = [
        [plain("random"), *out, prepared("generator"), plain("resumable")],
        [prepared("random"), plain("distributed"), *out, plain("random")],
    ]
    for chain in chains:
        whole = train(chain[0], epochs=1)[0]
        used: list[Any] = []
        saved: dict[str, Any] | None = None
        for make in chain:  # each but the last is killed after one batch
            seen, stops, _ = train(make, saved, epochs=1)
            used.append(seen[0])
            saved = stops[0]
        assert len(seen) == 1
        assert indices(used) == indices(whole)


def test_a_position_that_is_saved_before_its_epoch_begins_is_kept() -> None:
    for first, then in (
        (plain("random"), prepared("distributed")),
        (prepared("random"), plain("distributed")),
        (prepared("random"), plain("random")),
    ):
        seen, stops, _ = train(first, epochs=1)
        saved = stops[1]
        for make in (then, first, then):
            position = DataPosition()
            position.load_state_dict(saved["data"])
            position.open(make(), "train")
            saved = {**saved, "data": copy.deepcopy(position.state_dict())}
        assert indices(train(then, saved, epochs=1)[0]) == indices(seen[2:])


def test_another_batch_size_may_come_with_it() -> None:
    def larger() -> Any:
        data = Numbers()
        return FetchesAhead(DataLoader(data, 7, sampler=distributed(data)))

    seen, stops, _ = train(plain(), epochs=1)
    position = DataPosition(allowed_changes={"batch_size"})
    position.load_state_dict(stops[1]["data"])
    source = position.open(larger(), "train")
    source.begin(0)
    rest = [source.next_batch()[0].tolist() for _ in range(2)]
    assert source.used_up
    assert [index for batch in rest for index in batch] == indices(seen[2:])


def test_another_number_of_ranks_may_come_with_it() -> None:
    def ranks(num_ranks: int, rank: int, *, ahead: bool) -> Any:
        data: Any = Numbers()
        sampler: Any = DistributedSampler(data, num_replicas=num_ranks, rank=rank, seed=3)
        loader = DataLoader(data, BATCH_SIZE, sampler=sampler)
        return FetchesAhead(loader) if ahead else loader

    def taken(loader: Any, states: dict[int, Any], change: WorldChange | None) -> Any:
        position = DataPosition(allowed_changes={"world_size"})
        if change is not None:
            state, _ = position.resplit_state_dict(states, change)
            position.load_state_dict(copy.deepcopy(state))
        source = position.open(loader, "train")
        source.begin(0)
        return position, source

    for ahead in (False, True):
        used: list[int] = []
        states = {}
        for rank in range(2):
            position, source = taken(ranks(2, rank, ahead=ahead), {}, None)
            used += source.next_batch()[0].tolist()
            states[rank] = copy.deepcopy(position.state_dict())
        loader = DataLoader(Numbers(), BATCH_SIZE, shuffle=True)
        change = WorldChange(0, 1, 2)
        position, source = taken(loader if ahead else FetchesAhead(loader), states, change)
        while not source.used_up:
            used += source.next_batch()[0].tolist()
        assert sorted(used) == list(range(LENGTH))
        assert len(position.changes) == 2


# ---------------------------------------------------------------- what is refused


def taken_up(first: Make, then: Make, *, number: int = 2, seed: RunSeed | None = None) -> None:
    _, stops, _ = train(first, epochs=1)
    train(then, stops[number - 1], epochs=1, seed=seed)


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (plain("weighted"), prepared("random"), "a RandomSampler in this run.*WeightedRandom"),
        (
            prepared("random"),
            plain("own"),
            "of UserSampler in this run, expected that of a RandomSampler",
        ),
        (
            plain("own"),
            prepared("random"),
            "a RandomSampler in this run, expected that of UserSampler",
        ),
    ],
    ids=["weighted before", "own now", "own before"],
)
def test_an_order_without_a_name_asks_for_the_same_sampler(
    first: Make, then: Make, message: str
) -> None:
    with pytest.raises(DataPositionError, match=f"train: .*{message}.*same sampler under both"):
        taken_up(first, then)
    taken_up(first, then, number=PER_EPOCH)


def test_it_does_so_too_where_an_epoch_has_crossed_before() -> None:
    _, stops, _ = train(plain("random"), epochs=1)
    _, stops, _ = train(prepared("distributed"), stops[0], epochs=1)
    with pytest.raises(
        DataPositionError, match=r"of UserSampler in this run, expected .*RandomSampler"
    ):
        train(plain("own"), stops[0], epochs=1)


def test_another_dataset_is_refused() -> None:
    class Longer(Numbers):
        def __init__(self) -> None:
            super().__init__(LENGTH + 1)

    for first, then in ((plain(), prepared(data=Longer)), (prepared(), plain(data=Longer))):
        with pytest.raises(DataPositionError, match=r"num_samples 23.*expected .*num_samples 22"):
            taken_up(first, then)


def test_a_generator_of_the_dataset_that_is_missing_is_refused() -> None:
    for sampler in ("random", "distributed"):
        with pytest.raises(DataPositionError, match=r"expected generators \['dataset.rng'\]"):
            taken_up(plain(data=WithGenerator), prepared(sampler))


def test_a_stream_and_a_loader_with_a_state_are_refused_in_the_users_words() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            yield from ((index,) for index in range(LENGTH))

    class Stateful:
        def __iter__(self) -> Iterator[Any]:
            yield from ([torch.tensor([index])] for index in range(PER_EPOCH))

        def __len__(self) -> int:
            return PER_EPOCH

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def stream() -> Any:
        return DataLoader(Stream(), BATCH_SIZE)

    alone, ahead = (
        "a DataLoader that the loop draws from",
        "a loader that Accelerate or the Trainer",
    )
    for then, message in (
        (stream, f"an iterable that is replayed, expected.*{alone}"),
        (Stateful, f"a loader with a state of its own, expected.*{alone}"),
    ):
        with pytest.raises(DataPositionError, match=f"train: {message}.*Finish the epoch"):
            taken_up(plain(), then)
    with pytest.raises(DataPositionError, match=f"{ahead} has prepared, expected.*with a state"):
        taken_up(Stateful, prepared())


def test_the_other_mode_of_randomness_is_refused() -> None:
    seed = RunSeed()
    seed.value = 5
    for first, then in ((plain(), prepared()), (prepared(), plain())):
        with pytest.raises(DataPositionError, match="Finish the epoch with it"):
            taken_up(first, then, seed=seed)


def test_another_sampler_under_one_framework_stays_a_change_that_is_refused() -> None:
    for make in (plain, prepared):
        with pytest.raises(DataPositionError, match="another order"):
            taken_up(make("random"), make("in order"))
        with pytest.raises(DataPositionError, match="another order"):
            taken_up(make("random"), make("distributed"))


# ---------------------------------------------------------------- it can fail


@pytest.mark.parametrize("then", ["random", "distributed"])
def test_an_order_that_is_another_when_it_is_drawn_again_is_caught(then: str) -> None:
    for first, second in ((plain(), prepared(then)), (prepared(), plain(then))):
        _, stops, _ = train(first, epochs=1)
        other = torch.Generator().manual_seed(1).get_state()
        state = stops[1]["data"]["train"]
        state.get("inner", state)["start"]["at_first"]["torch"] = other
        with pytest.raises(DataPositionError, match="another order"):
            train(second, stops[1], epochs=1)


def test_without_what_was_ahead_the_numbers_are_others() -> None:
    seen, stops, _ = train(prepared(data=Noisy), epochs=1)
    again = train(plain(data=Noisy), stops[1], epochs=1)[0]
    assert batches(again)[0] == batches(seen)[2]
    stops[1]["data"]["train"]["ahead"] = []
    again = train(plain(data=Noisy), stops[1], epochs=1)[0]
    assert batches(again)[0] != batches(seen)[2]


def test_a_loader_that_was_at_another_position_is_left_as_it_is() -> None:
    inner = plain()()
    loader = FetchesAhead(inner)
    _, stops, _ = train(plain(), epochs=1)
    train(lambda: loader, stops[1], epochs=1)
    assert loader.base_dataloader is inner
    assert type(inner.batch_sampler) is BatchSampler
    assert open_source(loader, "train").kind == "wrapped"
