"""Samplers with random access: a bijection, the same everywhere, and shares as torch's."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from itertools import islice, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from resumekit.data import DistributedResumableSampler, ResumableSampler
from resumekit.data.epoch_order import LONGEST, InOrder, Permutation, share
from resumekit.data.position import DataPosition, open_source
from resumekit.errors import ConfigurationError, DataPositionError

HUNDRED_MILLION = 100_000_000

lengths = st.integers(0, 3000)
seeds = st.integers(-(2**63), 2**63)
epochs = st.integers(0, 1000)
quick = settings(max_examples=50, deadline=None)  # the machine may be busy


class Counting(Dataset[int]):
    """A dataset of any length that counts what is read of it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.num_reads += 1
        return index


# ---------------------------------------------------------------- the permutation


@quick
@given(length=lengths, seed=seeds, epoch=epochs)
def test_it_is_a_bijection(length: int, seed: int, epoch: int) -> None:
    indices = Permutation(length, seed=seed, epoch=epoch)[np.arange(length)]
    assert np.array_equal(np.sort(indices), np.arange(length))


@quick
@given(length=st.integers(1, 2**61), seed=seeds, epoch=epochs, data=st.data())
def test_chunks_agree_with_single_access_at_any_length(
    length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    order = Permutation(length, seed=seed, epoch=epoch)
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20))
    together = order[np.asarray(positions)]
    alone = [int(order[np.asarray([position])][0]) for position in positions]
    assert together.tolist() == alone
    assert len(set(alone)) == len(set(positions))
    assert all(0 <= index < length for index in alone)


def network(position: int, length: int, seed: int, epoch: int) -> int:
    """The same permutation, written plainly and with whole numbers of any size."""
    high_size = math.isqrt(max(length - 1, 0)) + 1
    low_size = -(-length // high_size)
    name = f"resumekit permutation 1: {length} {seed} {epoch}"
    while True:
        high, low = divmod(position, low_size)
        for number in range(24 if length < 2**16 else 8):
            key = hashlib.blake2b(f"{name} {number}".encode(), digest_size=8).digest()
            mixed = (low, high)[number % 2] ^ int.from_bytes(key, "little")
            mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
            if number % 2:
                low = (low + (mixed >> 32) * low_size // 2**32) % low_size
            else:
                high = (high + (mixed >> 32) * high_size // 2**32) % high_size
        position = high * low_size + low
        if position < length:
            return position


@quick
@given(length=st.integers(1, 2**61), seed=seeds, epoch=epochs, data=st.data())
def test_it_is_the_network_that_is_described(
    length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, length - 1))
    index = Permutation(length, seed=seed, epoch=epoch)[np.asarray([position])]
    assert index.tolist() == [network(position, length, seed, epoch)]


@pytest.mark.parametrize(
    ("name", "positions", "indices"),
    [
        ((10, 0, 0), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 0, 4, 5, 3, 8, 7, 9, 6, 2]),
        ((10, 0, 1), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [5, 8, 6, 7, 9, 3, 1, 0, 2, 4]),
        ((10, 7, 0), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 9, 3, 6, 1, 8, 5, 4, 7, 2]),
        ((1000, -3, 5), [0, 1, 500, 999], [410, 160, 917, 488]),
        ((65536, 1, 2), [0, 1, 65535], [52529, 14321, 21423]),
        ((100000000, 42, 3), [0, 50000000, 99999999], [34607188, 97356318, 69591855]),
        (
            (1099511627783, 1, 2),
            [0, 549755813888, 1099511627782],
            [110342444230, 13966243534, 362722347009],
        ),
    ],
)
def test_the_same_name_gives_the_same_order_on_every_machine(
    name: tuple[int, int, int], positions: list[int], indices: list[int]
) -> None:
    length, seed, epoch = name
    order = Permutation(length, seed=seed, epoch=epoch)
    assert order[np.asarray(positions)].tolist() == indices


@pytest.mark.parametrize("length", [2, 3, 4])
def test_every_order_of_few_indices_is_as_likely_as_any_other(length: int) -> None:
    num_orders, each = math.factorial(length), 100
    seen = Counter(
        tuple(Permutation(length, seed=seed)[np.arange(length)].tolist())
        for seed in range(num_orders * each)
    )
    squares = sum((seen[order] - each) ** 2 / each for order in permutations(range(length)))
    degrees = num_orders - 1
    assert squares < degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("length", [100, 70_000])
def test_an_order_looks_drawn_and_those_of_two_epochs_unrelated(length: int) -> None:
    first, second = (Permutation(length, epoch=epoch)[np.arange(length)] for epoch in (0, 1))
    positions = np.arange(length)
    limit = 5 / math.sqrt(length)
    for one, other in ((first, positions), (first[1:], first[:-1]), (first, second)):
        assert abs(np.corrcoef(one, other)[0, 1]) < limit
        assert np.count_nonzero(one == other) < 10


@pytest.mark.parametrize("length", [-1, LONGEST])
def test_a_length_that_it_cannot_permute_is_refused(length: int) -> None:
    with pytest.raises(ConfigurationError, match=str(length)):
        Permutation(length)


# ---------------------------------------------------------------- the samplers


@quick
@given(length=lengths, seed=st.integers(0, 9), epoch=epochs, data=st.data())
def test_an_epoch_begun_in_the_middle_is_its_second_half(
    length: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    sampler = ResumableSampler(range(length), seed=seed)
    sampler.set_epoch(epoch)
    whole = list(sampler)
    position = data.draw(st.integers(0, length))
    assert list(sampler.iterate_from(position)) == whole[position:]
    assert sorted(whole) == list(range(length))


@pytest.mark.parametrize("shuffle", [True, False])
@quick
@given(length=st.integers(1, 200), num_replicas=st.integers(1, 9), drop_last=st.booleans())
def test_ranks_partition_an_order_as_torch_does(
    shuffle: bool, length: int, num_replicas: int, drop_last: bool
) -> None:
    order = list(ResumableSampler(range(length), shuffle=shuffle, seed=4))
    for rank in range(num_replicas):
        settings: dict[str, Any] = {
            "num_replicas": num_replicas,
            "rank": rank,
            "drop_last": drop_last,
        }
        ours = DistributedResumableSampler(range(length), shuffle=shuffle, seed=4, **settings)
        stock: Any = DistributedSampler(range(length), shuffle=False, **settings)  # type: ignore[arg-type]
        assert list(ours) == [order[position] for position in stock]
        assert len(ours) == len(stock) == len(list(ours))


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    assert list(ResumableSampler(range(5), shuffle=False)) == [0, 1, 2, 3, 4]


def test_an_iteration_under_way_keeps_its_epoch() -> None:
    sampler = ResumableSampler(range(100))
    expected = list(sampler)
    indices = iter(sampler)
    begun = list(islice(indices, 10))
    sampler.set_epoch(1)
    assert begun + list(indices) == expected
    assert list(sampler) != expected


def test_an_announced_job_without_a_process_group_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert DistributedResumableSampler(range(4)).num_replicas == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="WORLD_SIZE=2"):
        DistributedResumableSampler(range(4))


# ---------------------------------------------------------------- in a loader


def samplers(data: Counting, **settings: Any) -> list[Any]:
    return [
        ResumableSampler(data, **settings),
        DistributedResumableSampler(data, num_replicas=3, rank=1, **settings),
    ]


@pytest.mark.parametrize("which", [0, 1])
def test_the_middle_of_a_hundred_million_samples_is_found_without_reading_or_drawing(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_used = 10_000_000  # batches
    data = Counting(HUNDRED_MILLION)
    sampler = samplers(data)[which]
    loader = DataLoader(data, batch_size=2, sampler=sampler)
    source = open_source(loader, "train")
    source.begin(1)
    source.next_batch()
    state = source.state_dict()
    replicas = state["geometry"]["num_replicas"]
    state.update(batch=num_used, samples=num_used * 2 * replicas)
    data.num_reads = 0

    num_computed = 0
    read = Permutation.__getitem__

    def counted(order: Permutation, positions: Any) -> Any:
        nonlocal num_computed
        num_computed += len(positions)
        return read(order, positions)

    monkeypatch.setattr(Permutation, "__getitem__", counted)
    again = open_source(DataLoader(data, batch_size=2, sampler=samplers(data)[which]), "train")
    again.load_state_dict(state)
    again.begin(1)
    assert (data.num_reads, num_computed) == (0, 0)
    batch = again.next_batch().tolist()
    assert data.num_reads == 2
    assert num_computed < 10_000
    positions = np.asarray(
        [state["samples"] + getattr(sampler, "rank", 0) + i * replicas for i in (0, 1)]
    )
    assert batch == Permutation(HUNDRED_MILLION, epoch=1)[positions].tolist()


@pytest.mark.parametrize("which", [0, 1])
def test_another_seed_is_refused_and_named(which: int) -> None:
    data = Counting(60)
    source = open_source(DataLoader(data, 4, sampler=samplers(data, seed=1)[which]), "train")
    source.begin(0)
    source.next_batch()
    state = source.state_dict()
    other = open_source(DataLoader(data, 4, sampler=samplers(data, seed=2)[which]), "train")
    other.load_state_dict(state)
    with pytest.raises(DataPositionError, match=r"seed 2.*expected.*seed 1"):
        other.begin(0)


def test_a_custom_sampler_with_random_access_begins_at_its_position() -> None:
    class Backwards:
        """Counts down, and says from where it was asked to begin."""

        def __init__(self) -> None:
            self.begun_at: list[int] = []

        def __len__(self) -> int:
            return 50

        def __iter__(self) -> Any:
            return self.iterate_from(0)

        def iterate_from(self, position: int) -> Any:
            self.begun_at.append(position)
            return iter(range(49 - position, -1, -1))

        def order_name(self) -> dict[str, Any]:
            return {"kind": "backwards"}

    def opened(sampler: Backwards) -> tuple[DataPosition, Any]:
        position = DataPosition()
        return position, DataLoader(Counting(50), 4, sampler=sampler)

    position, loader = opened(Backwards())
    source = position.open(loader, "train")
    source.begin(0)
    used = [source.next_batch().tolist() for _ in range(3)]
    sampler = Backwards()
    again, loader = opened(sampler)
    again.load_state_dict(position.state_dict())
    source = again.open(loader, "train")
    source.begin(0)
    rest = [source.next_batch().tolist() for _ in range(len(loader) - 3)]
    assert [index for batch in used + rest for index in batch] == list(range(49, -1, -1))
    assert sampler.begun_at == [12]


@quick
@given(st.integers(1, 200), st.integers(0, 199), st.integers(1, 8), st.integers(1, 5))
def test_ranks_that_alternate_over_batches_use_up_what_is_left(
    length: int, position: int, size: int, ranks: int
) -> None:
    position = min(position, length - 1)
    per_rank = -(-math.ceil((length - position) / size) // ranks)
    alternating = [
        list(
            share(
                InOrder(length),
                per_rank * size,
                position=position,
                in_a_row=size,
                num_replicas=ranks,
                replica=rank,
            )
        )
        for rank in range(ranks)
    ]
    batches = [alternating[n % ranks][n // ranks * size :][:size] for n in range(per_rank * ranks)]
    together = [index for batch in batches for index in batch]
    num_left = length - position
    assert together[:num_left] == list(range(position, length))
    assert together[num_left:] == [n % length for n in range(len(together) - num_left)]
