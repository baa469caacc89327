"""An epoch continues with another batch size or number of ranks: each index once.

The ranks of a job are loaders and positions of one process here; integration tests have real ones.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from resumekit.adapters.torch import Checkpointer
from resumekit.data import DistributedResumableSampler, ResumableSampler
from resumekit.data.epoch_order import Batching, order_name
from resumekit.data.loader_changes import OrderFit
from resumekit.data.position import DataPosition
from resumekit.errors import DataPositionError
from resumekit.state import WorldChange

ALLOWED = frozenset({"batch_size", "world_size"})


def position_of(source: Any) -> tuple[int, int]:
    """Epoch and batch of the next batch; the end of an epoch is the start of the next one."""
    if source.epoch_batches and source.batch >= source.epoch_batches:
        return source.epoch + 1, 0
    return source.epoch, source.batch


class Numbers(Dataset[int]):
    """Gives back the index, and counts what is read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.num_reads += 1
        return index


class Launch(NamedTuple):
    """One launch of the job: its ranks, its batch size, and after how many batches it dies."""

    num_ranks: int
    batch_size: int
    num_batches: int | None = None


def make_loader(
    kind: str,
    launch: Launch,
    rank: int,
    length: int,
    *,
    drop_last: bool = False,
    drop_ranks: bool = False,
) -> DataLoader[Any]:
    """A loader of one rank; "changing" is the script that takes a plain sampler for one rank."""
    data = Numbers(length)
    shared: dict[str, Any] = {
        "num_replicas": launch.num_ranks,
        "rank": rank,
        "seed": 3,
        "drop_last": drop_ranks,
    }
    samplers: dict[str, Any] = {
        "distributed": lambda: DistributedSampler(data, **shared),
        "in order": lambda: DistributedSampler(data, shuffle=False, **shared),
        "resumable": lambda: DistributedResumableSampler(data, **shared),
        "random": lambda: RandomSampler(data),
        "generator": lambda: RandomSampler(data, generator=torch.Generator().manual_seed(5)),
        "sequential": lambda: SequentialSampler(data),
        "resumable alone": lambda: ResumableSampler(data, seed=3),
    }
    if kind == "changing":
        kind = "distributed" if launch.num_ranks > 1 else "random"
    elif kind == "changing generator":
        kind = "distributed" if launch.num_ranks > 1 else "generator"
    return DataLoader(data, launch.batch_size, sampler=samplers[kind](), drop_last=drop_last)


ALONE = ("random", "generator", "sequential", "resumable alone")
SHARED = ("distributed", "in order", "resumable", "changing", "changing generator")


class Rank:
    """One rank of one launch."""

    def __init__(
        self,
        loader: DataLoader[Any],
        states: Sequence[Any] | None = None,
        change: WorldChange | None = None,
        *,
        allowed: frozenset[str] = ALLOWED,
    ) -> None:
        self.loader = loader
        self.position = DataPosition(allowed_changes=allowed)
        if states is not None and change is not None:
            state = states[change.model_rank]
            if change.world_size != change.former_world_size:
                readable = {rank: states[rank] for rank in change.readable}
                state, _ = self.position.resplit_state_dict(readable, change)
            self.position.load_state_dict(copy.deepcopy(state))
        self.source = self.position.open(loader, "train")

    def train(self, num_batches: int | None, *, epoch: int = 0) -> list[list[int]]:
        """The batches of an epoch, up to so many."""
        batches: list[list[int]] = []
        if position_of(self.source)[0] > epoch:
            return batches
        self.source.begin(epoch)
        while not self.source.used_up and (num_batches is None or len(batches) < num_batches):
            batches.append(self.source.next_batch().tolist())
        if self.source.used_up:
            with pytest.raises(StopIteration):
                self.source.next_batch()
            self.source.end_epoch()
        return batches

    def state(self) -> Any:
        return copy.deepcopy(self.position.state_dict())


def start(
    kind: str, launch: Launch, length: int, states: list[Any] | None = None, **options: Any
) -> list[Rank]:
    """All ranks of a launch, in the position that the former launch saved."""
    ranks = []
    for rank in range(launch.num_ranks):
        torch.manual_seed(0 if states is None else 77)  # what a resumed process happens to be at
        loader = make_loader(kind, launch, rank, length, **options)
        change = WorldChange(rank, launch.num_ranks, len(states)) if states else None
        ranks.append(Rank(loader, states, change))
    return ranks


def run(
    kind: str, plan: Sequence[Launch], length: int, **options: Any
) -> tuple[list[list[list[list[int]]]], list[Rank]]:
    """The batches by launch and rank, and the ranks of the last launch."""
    used, states, ranks = [], None, []
    for launch in plan:
        ranks = start(kind, launch, length, states, **options)
        used.append([rank.train(launch.num_batches) for rank in ranks])
        states = [rank.state() for rank in ranks]
    return used, ranks


def flat(batches: Any) -> list[int]:
    if isinstance(batches, int):
        return [batches]
    return [index for each in batches for index in flat(each)]


def whole_order(kind: str, length: int) -> list[int]:
    """What one rank of a first launch goes through, by torch's own loop."""
    torch.manual_seed(0)
    loader = make_loader(kind, Launch(1, 1), 0, length)
    return flat([batch.tolist() for batch in loader])


def expected_run(
    order: list[int], plan: Sequence[Launch], *, drop_last: bool, drop_ranks: bool
) -> list[list[list[list[int]]]]:
    """The same by slices: each launch partitions the rest and dies after so many batches."""
    position, expected = 0, []
    for launch in plan:
        num_ranks, size, num_batches = launch
        left = order[position:]
        if drop_ranks and num_ranks > 1:
            left = left[: len(left) // num_ranks * num_ranks]
        else:
            left = left + (order * num_ranks)[: -len(left) % num_ranks]
        ranks = []
        for rank in range(num_ranks):
            mine = left[rank::num_ranks]
            batches = [mine[first : first + size] for first in range(0, len(mine), size)]
            ranks.append([b for b in batches if len(b) == size or not drop_last][:num_batches])
        expected.append(ranks)
        num_used = len(ranks[0])
        if not num_used and position:
            continue  # nothing is left for so many ranks; it was not dropped for good
        is_over = num_batches is None or num_used < num_batches
        is_over = is_over or num_used == _num_batches(left, launch, drop_last=drop_last)
        position = len(order) if is_over else position + num_used * size * num_ranks
    return expected


def _num_batches(left: list[int], launch: Launch, *, drop_last: bool) -> int:
    each = len(left) // launch.num_ranks
    return each // launch.batch_size if drop_last else -(-each // launch.batch_size)


batch_sizes = st.integers(1, 7)
deaths = st.integers(1, 6)
quick = settings(max_examples=30, deadline=None)  # the machine may be busy


def plans(*, most_ranks: int) -> st.SearchStrategy[list[Launch]]:
    launch = st.builds(Launch, st.integers(1, most_ranks), batch_sizes, deaths)
    last = st.builds(Launch, st.integers(1, most_ranks), batch_sizes, st.none())
    return st.tuples(st.lists(launch, min_size=1, max_size=3), last).map(lambda p: [*p[0], p[1]])


# ---------------------------------------------------------------- each index once


@pytest.mark.parametrize("kind", SHARED)
@quick
@given(
    length=st.integers(1, 90),
    plan=plans(most_ranks=4),
    drop_last=st.booleans(),
    drop_ranks=st.booleans(),
)
def test_with_other_ranks_and_batches_the_rest_of_the_epoch_is_sharded(
    kind: str, length: int, plan: list[Launch], drop_last: bool, drop_ranks: bool
) -> None:
    used, _ = run(kind, plan, length, drop_last=drop_last, drop_ranks=drop_ranks)
    first = "distributed" if plan[0].num_ranks > 1 and kind.startswith("changing") else kind
    order = whole_order(first, length)
    assert sorted(order) == list(range(length))
    options = {"drop_last": drop_last, "drop_ranks": drop_ranks}
    assert used == expected_run(order, plan, **options)
    counts = Counter(flat(used))
    if not drop_last and not drop_ranks:
        assert set(counts) == set(range(length))
        assert counts.total() - length < max(launch.num_ranks for launch in plan)
    elif drop_last and all(launch.num_ranks == 1 for launch in plan):
        assert set(counts.values()) <= {1}


@pytest.mark.parametrize("kind", ALONE)
@quick
@given(length=st.integers(1, 90), plan=plans(most_ranks=1), drop_last=st.booleans())
def test_with_other_batches_the_epoch_continues_in_its_order(
    kind: str, length: int, plan: list[Launch], drop_last: bool
) -> None:
    used, _ = run(kind, plan, length, drop_last=drop_last)
    order = whole_order(kind, length)
    assert used == expected_run(order, plan, drop_last=drop_last, drop_ranks=False)
    num_left = len(order) - len(flat(used))
    assert flat(used) == order[: len(order) - num_left]
    assert num_left < (max(launch.batch_size for launch in plan) if drop_last else 1)


@pytest.mark.parametrize("kind", ["distributed", "in order", "resumable"])
@quick
@given(
    num_globals=st.integers(1, 8),
    ways=st.lists(st.sampled_from([(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (2, 3), (1, 4)])),
    data=st.data(),
)
def test_with_the_global_batch_kept_the_sequence_of_global_batches_is_the_same(
    kind: str, num_globals: int, ways: list[tuple[int, int]], data: st.DataObject
) -> None:
    plan = []
    left = num_globals
    for num_ranks, size in [*ways, (2, 6)]:  # ranks x batch x accumulation is always 12
        steps = data.draw(st.integers(0, left))
        if steps:
            plan.append(Launch(num_ranks, size, steps * 12 // (num_ranks * size)))
        left -= steps
    plan.append(Launch(1, 12, None))
    used, _ = run(kind, plan, num_globals * 12)
    order = whole_order(kind, num_globals * 12)
    globals_ = []
    for launch, ranks in zip(plan, used, strict=True):
        window = 12 // (launch.num_ranks * launch.batch_size)
        for first in range(0, len(ranks[0]), window):
            globals_.append(set(flat([rank[first : first + window] for rank in ranks])))
    assert globals_ == [set(order[i : i + 12]) for i in range(0, len(order), 12)]


@pytest.mark.parametrize("kind", ["distributed", "resumable"])
def test_later_epochs_are_those_of_the_new_geometry(kind: str) -> None:
    plan = [Launch(2, 4, 3), Launch(3, 2)]
    _, ranks = run(kind, plan, 50)
    for rank, each in enumerate(ranks):
        loader = make_loader(kind, plan[1], rank, 50)
        loader.sampler.set_epoch(1)  # type: ignore[attr-defined]
        assert each.train(None, epoch=1) == [batch.tolist() for batch in loader]


@pytest.mark.parametrize(
    ("kind", "first", "then"),
    [
        ("random", Launch(1, 4), Launch(1, 8)),
        ("distributed", Launch(2, 4), Launch(3, 4)),
        ("resumable", Launch(2, 4), Launch(1, 8)),
    ],
)
def test_the_same_geometry_again_after_a_change_continues_as_if_never_left(
    kind: str, first: Launch, then: Launch
) -> None:
    begun = start(kind, first, 60)
    for rank in begun:
        rank.train(2)
    states = [rank.state() for rank in begun]
    whole = [rank.train(None) for rank in start(kind, then, 60, states)]
    for num_used in range(1, len(whole[0])):
        broken = start(kind, then, 60, states)
        used = [rank.train(num_used) for rank in broken]
        again = start(kind, then, 60, [rank.state() for rank in broken])
        rest = [rank.train(None) for rank in again]
        assert [a + b for a, b in zip(used, rest, strict=True)] == whole


def test_a_position_that_is_saved_before_its_epoch_begins_is_kept() -> None:
    ranks = start("distributed", Launch(2, 4), 50)
    used = [rank.train(2) for rank in ranks]
    states = [rank.state() for rank in ranks]
    for num_ranks in (3, 1):  # launches that are killed before they fetch anything
        states = [rank.state() for rank in start("distributed", Launch(num_ranks, 5), 50, states)]
    rest = [rank.train(None) for rank in start("distributed", Launch(2, 3), 50, states)]
    assert sorted(flat([used, rest])) == list(range(50))


def test_a_loader_that_this_launch_does_not_open_follows_two_changes_at_once() -> None:
    ranks = start("distributed", Launch(2, 4), 50)
    used = [rank.train(2) for rank in ranks]
    states = [rank.state() for rank in ranks]
    change = WorldChange(0, 1, 2)
    unopened, _ = DataPosition().resplit_state_dict(dict(enumerate(states)), change)
    assert unopened["train"]["ranks"] == [2, 1]
    rest = [rank.train(None) for rank in start("distributed", Launch(3, 4), 50, [unopened])]
    assert set(flat([used, rest])) == set(range(50))
    assert len(flat([used, rest])) == 52  # 34 are left for 3 ranks


def test_two_changes_of_the_ranks_are_one_from_the_first_number_to_the_last() -> None:
    ranks = start("distributed", Launch(4, 2), 50)
    for rank in ranks:
        rank.train(2)
    four = {number: rank.state() for number, rank in enumerate(ranks)}
    two = {
        rank: DataPosition().resplit_state_dict(four, WorldChange(rank, 2, 4))[0]
        for rank in range(2)
    }
    one, _ = DataPosition().resplit_state_dict(two, WorldChange(0, 1, 2))
    assert [state["train"]["ranks"] for state in (*two.values(), one)] == [[4, 2], [4, 2], [4, 1]]


def test_a_loader_that_followed_no_change_yet_leaves_the_others_to_the_last_change() -> None:
    [first, second] = start("distributed", Launch(2, 4), 50)
    unopened = {**first.state()["train"], "ranks": [4, 2]}
    state = {"a": unopened, "b": second.state()["train"]}
    resplit, _ = DataPosition().resplit_state_dict({0: state, 1: state}, WorldChange(0, 1, 2))
    assert {name: each["ranks"] for name, each in resplit.items()} == {"a": [4, 1], "b": [2, 1]}


def test_a_new_rank_has_private_generators_and_workers_of_its_own() -> None:
    states: dict[int, Any] = {}
    for number, rank in enumerate(start("distributed", Launch(2, 4), 50)):
        rank.train(2)
        states[number] = rank.state()
        position = states[number]["train"]
        position["generators"] = {"loader": torch.Generator().manual_seed(number).get_state()}
        position["workers"] = {0: "a state"}
    new, _ = DataPosition().resplit_state_dict(states, WorldChange(2, 3, 2))
    for former in states.values():
        then, now = former["train"]["generators"]["loader"], new["train"]["generators"]["loader"]
        assert then.shape == now.shape
        assert not torch.equal(then, now)
    assert new["train"]["workers"] == {}


@pytest.mark.parametrize("persistent", [False, True])
def test_with_workers_the_rest_is_sharded_as_without(persistent: bool) -> None:
    def job(launch: Launch, states: list[Any] | None = None) -> list[Rank]:
        ranks = []
        for rank in range(launch.num_ranks):
            loader = make_loader("distributed", launch, rank, 40)
            settings: Any = {"num_workers": 2, "persistent_workers": persistent}
            loader = DataLoader(
                loader.dataset, launch.batch_size, sampler=loader.sampler, **settings
            )
            change = WorldChange(rank, launch.num_ranks, len(states)) if states else None
            ranks.append(Rank(loader, states, change))
        return ranks

    plan = [Launch(1, 4, 3), Launch(2, 2, 3), Launch(1, 8)]
    used, states = [], None
    for launch in plan:
        ranks = job(launch, states)
        used.append([rank.train(launch.num_batches) for rank in ranks])
        states = [rank.state() for rank in ranks]
    assert used == run("distributed", plan, 40)[0]
    assert Counter(flat(used)) == Counter(range(40))


class FetchesAhead:
    """A framework's loader, as accelerate makes it: some batches ahead of what it hands out."""

    def __init__(self, base_dataloader: Any, depth: int) -> None:
        self.base_dataloader = base_dataloader
        self.depth = depth
        self.epochs: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)

    def __len__(self) -> int:
        return len(self.base_dataloader)

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)
        self.base_dataloader.sampler.set_epoch(epoch)

    def __iter__(self) -> Any:
        waiting: list[Any] = []
        for batch in self.base_dataloader:
            waiting.append(batch)
            if len(waiting) > self.depth:
                yield waiting.pop(0)
        yield from waiting


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", ["distributed", "resumable"])
@quick
@given(length=st.integers(1, 60), plan=plans(most_ranks=3))
def test_around_a_framework_that_fetches_ahead_the_epoch_continues_as_without(
    kind: str, depth: int, length: int, plan: list[Launch]
) -> None:
    used: list[Any] = []
    states: list[Any] | None = None
    for launch in plan:
        ranks = []
        for rank in range(launch.num_ranks):
            loader: Any = FetchesAhead(make_loader(kind, launch, rank, length), depth)
            change = WorldChange(rank, launch.num_ranks, len(states)) if states else None
            ranks.append(Rank(loader, states, change))
        used.append([rank.train(launch.num_batches) for rank in ranks])
        states = [rank.state() for rank in ranks]
    assert used == run(kind, plan, length)[0]


def test_used_samples_are_not_read_again() -> None:
    states = [rank.state() for rank in _trained("distributed", Launch(2, 4, 3), 50)]
    for rank in start("distributed", Launch(3, 4), 50, states):
        rank.source.begin(0)
        assert rank.loader.dataset.num_reads == 0  # type: ignore[attr-defined]


def _trained(kind: str, launch: Launch, length: int) -> list[Rank]:
    ranks = start(kind, launch, length)
    for rank in ranks:
        rank.train(launch.num_batches)
    return ranks


# ---------------------------------------------------------------- what is reported


def test_the_number_of_the_batch_is_counted_in_the_new_geometry() -> None:
    states = [rank.state() for rank in _trained("distributed", Launch(2, 4, 3), 80)]
    positions = {}
    for launch in (Launch(2, 4), Launch(1, 8), Launch(1, 4), Launch(1, 16), Launch(3, 16)):
        source = start("distributed", launch, 80, states)[0].source
        positions[launch[:2]] = (*position_of(source), source.epoch_batches)
    assert positions == {
        (2, 4): (0, 3, 10),
        (1, 8): (0, 3, 10),
        (1, 4): (0, 6, 20),
        (1, 16): (0, 1, 5),
        (3, 16): (0, 1, 3),  # 24 samples are less than one batch of each rank, and not none
    }


def test_the_changes_are_reported_with_the_position() -> None:
    states = [rank.state() for rank in _trained("distributed", Launch(2, 4, 3), 80)]
    rank = start("distributed", Launch(1, 8), 80, states)[0]
    assert rank.position.changes == [
        "train: batch_size was 4, this run's 8 is used from sample 24 of epoch 0 on",
        "train: number of ranks was 2, this run's 1 is used from sample 24 of epoch 0 on",
    ]


# ---------------------------------------------------------------- a whole run


@pytest.mark.parametrize("loop", ["batches", "epochs"])
@pytest.mark.parametrize(
    ("sizes", "num_used"),
    [
        ((4, 8, 2), 34),  # 2 x 4, 1 x 8 and 9 x 2
        ((4, 32), 8),  # 2 x 4; the 26 that are left are less than one batch, and dropped
    ],
)
def test_a_checkpointer_continues_and_ends_each_epoch_where_the_last_geometry_does(
    tmp_path: Path, loop: str, sizes: tuple[int, ...], num_used: int
) -> None:
    used = []
    for number, size in enumerate(sizes):
        torch.manual_seed(number)
        model = torch.nn.Linear(1, 1)
        inputs = torch.arange(34.0).reshape(-1, 1)
        loader = DataLoader(TensorDataset(inputs), size, shuffle=True, drop_last=True)
        checkpointer = Checkpointer(
            tmp_path,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            save_every=1,
            allow_changes={"batch_size"},
            loop_variables="off",  # all launches are made in this function
        )
        launch = _batches(checkpointer, loader, loop)
        is_last = number + 1 == len(sizes)
        for (batch,) in launch if is_last else islice(launch, 3 - number):
            used.append((checkpointer.progress.epoch, batch.flatten().int().tolist()))
            checkpointer.step()
        if not is_last:
            # The loop is left before its next safe point: the last step is done again.
            used.pop()
            checkpointer._run.close()
        else:
            checkpointer.close()
    first = [index for epoch, batch in used if epoch == 0 for index in batch]
    assert len(set(first)) == len(first) == num_used
    assert sorted({epoch for epoch, _ in used}) == [0, 1]
    whole = [batch for epoch, batch in used if epoch == 1]
    assert len(whole) == 34 // sizes[-1]
    assert len(set(flat(whole))) == len(flat(whole))


def _batches(checkpointer: Checkpointer, loader: DataLoader[Any], loop: str) -> Any:
    if loop == "batches":
        yield from checkpointer.batches(loader, epochs=2)
        return
    for _ in checkpointer.epochs(2):
        yield from checkpointer.batches(loader)


# ---------------------------------------------------------------- what is refused


class UserBatchSampler(Sampler[list[int]]):
    """A custom batch sampler."""

    def __init__(self, length: int, batch_size: int) -> None:
        self.length = length
        self.batch_size = batch_size

    def __len__(self) -> int:
        return self.length // self.batch_size

    def __iter__(self) -> Any:
        size = self.batch_size
        return iter([list(range(i, i + size)) for i in range(0, self.length, size)])


def weighted(length: int) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0] * length, length)


def taken_up(
    first: list[DataLoader[Any]],
    then: DataLoader[Any],
    *,
    num_ranks: int = 1,
    allowed: frozenset[str] = ALLOWED,
    num_batches: int = 2,
) -> Rank:
    """Rank 0 of a job of ``num_ranks``, with the state that the ranks of the first one saved."""
    begun = [Rank(loader) for loader in first]
    for rank in begun:
        rank.train(num_batches)
    change = WorldChange(0, num_ranks, len(first))
    return Rank(then, [rank.state() for rank in begun], change, allowed=allowed)


def test_a_change_that_is_not_allowed_is_refused_with_the_option_that_allows_it() -> None:
    data = Numbers(32)
    with pytest.raises(
        DataPositionError,
        match=r"train: batch_size 8.*expected batch_size 4.*allow_changes=\{'batch_size'\}",
    ):
        taken_up([DataLoader(data, 4)], DataLoader(data, 8), allowed=frozenset({"world_size"}))
    shared = [make_loader("distributed", Launch(2, 4), rank, 32) for rank in range(2)]
    alone = make_loader("distributed", Launch(1, 4), 0, 32)
    with pytest.raises(
        DataPositionError,
        match=r"number of ranks 1, expected number of ranks 2.*allow_changes=\{'world_size'\}",
    ):
        taken_up(shared, alone, allowed=frozenset({"batch_size"}))


@pytest.mark.parametrize(
    "changed",
    [
        lambda: DataLoader(Numbers(33), 8),
        lambda: DataLoader(Numbers(32), 8, drop_last=True),
        lambda: DataLoader(Numbers(32), 8, sampler=RandomSampler(range(16))),
    ],
    ids=["dataset", "drop_last", "sampler"],
)
def test_what_has_no_option_is_refused_whatever_is_allowed(changed: Any) -> None:
    with pytest.raises(
        DataPositionError, match=r"expected .* Restore the former settings"
    ) as failure:
        taken_up([DataLoader(Numbers(32), 4)], changed())
    assert "allow_changes" not in str(failure.value)


def test_a_batch_sampler_of_ones_own_keeps_its_batch_size_inside_an_epoch() -> None:
    data = Numbers(32)
    loaders = [DataLoader(data, batch_sampler=UserBatchSampler(32, size)) for size in (4, 8)]
    with pytest.raises(
        DataPositionError, match=r"batch sampler UserBatchSampler, .*because the batch_size changed"
    ):
        taken_up(loaders[:1], loaders[1])
    at_the_end = taken_up(loaders[:1], loaders[1], num_batches=8)
    assert position_of(at_the_end.source) == (1, 0)
    assert at_the_end.train(1, epoch=1) == [[0, 1, 2, 3, 4, 5, 6, 7]]


class DrawnWhenAsked(Sampler[int]):
    """Draws each index from the global generator when it is asked for it."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(1000, ())) for _ in range(8))


@pytest.mark.parametrize("num_batches", [1, 2, 3])
def test_an_index_that_is_drawn_when_it_is_asked_for_is_not_drawn_twice(
    tmp_path: Path, num_batches: int
) -> None:
    def run(directory: Path, batch_size: int, leave_after: int = 9) -> list[int]:
        torch.manual_seed(0)
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options: Any = {"loop_variables": "off", "allow_changes": {"batch_size"}, "save_every": 1}
        loader = DataLoader(Numbers(1000), batch_size, sampler=DrawnWhenAsked())
        seen: list[int] = []
        with Checkpointer(directory, model=model, optimizer=optimizer, **options) as checkpointer:
            for batch in checkpointer.batches(loader, epochs=1):
                seen += batch.tolist()
                checkpointer.step()
                if checkpointer.progress.step == leave_after:
                    break
        return seen

    used = run(tmp_path / "run", 2, num_batches)
    assert used + run(tmp_path / "run", 4) == run(tmp_path / "whole", 2)


def test_the_error_names_the_change_that_cannot_be_followed() -> None:
    """Ranks that take turns over batches: another batch size is no other number of ranks."""
    sampler = WeightedRandomSampler([1.0] * 32, 32)
    batching = Batching(sampler, BatchSampler(sampler, 8, False), 2, by_batches=True)
    name = order_name(sampler, {})
    geometry = {"batch_size": 8, "num_replicas": 2, "generators": []}
    state = {
        **{"epoch": 2, "batch": 3, "samples": 24, "order_name": name, "draws": {}},
        **{"used": {"since": 0}, "generators": {}, "geometry": {**geometry, "batch_size": 4}},
    }
    with pytest.raises(DataPositionError, match="because the batch_size changed inside epoch 2"):
        OrderFit(state, geometry, "train", ALLOWED, batching, name).fitted()


def test_torchs_batch_sampler_handed_over_as_such_follows() -> None:
    data = Numbers(32)
    loaders = [
        DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), size, False))
        for size in (4, 8)
    ]
    assert taken_up(loaders[:1], loaders[1]).train(1) == [[*range(8, 16)]]


def test_a_loader_that_does_not_batch_follows_another_number_of_ranks() -> None:
    def loader(launch: Launch, rank: int) -> DataLoader[Any]:
        data = Numbers(32)
        sampler: Any = DistributedSampler(data, launch.num_ranks, rank)
        return DataLoader(data, batch_size=None, sampler=sampler)

    begun = [Rank(loader(Launch(2, 1), rank)) for rank in range(2)]
    used = []
    for rank in begun:
        rank.source.begin(0)
        used += [rank.source.next_batch() for _ in range(5)]
    states = [rank.state() for rank in begun]
    again = Rank(loader(Launch(1, 1), 0), states, WorldChange(0, 1, 2))
    again.source.begin(0)
    used += [again.source.next_batch() for _ in range(22)]
    assert sorted(used) == list(range(32))


@pytest.mark.parametrize(
    ("first", "then", "num_ranks", "message"),
    [
        (
            [lambda d: RandomSampler(d), lambda d: RandomSampler(d)],
            lambda d: RandomSampler(d),
            1,
            "each of 2 ranks went through by itself",
        ),
        (
            [lambda d: weighted(32), lambda d: weighted(32)],
            lambda d: weighted(32),
            1,
            "each of 2 ranks went through by itself",
        ),
        (
            [lambda d: RandomSampler(d)],
            lambda d: RandomSampler(d),
            2,
            "a RandomSampler on each of 2 ranks",
        ),
        (
            [lambda d: weighted(32)],
            lambda d: DistributedSampler(d, 2, 0),
            2,
            "the order of a WeightedRandomSampler in the checkpoint",
        ),
        (
            [lambda d: DistributedSampler(d, 2, 0), lambda d: DistributedSampler(d, 2, 1)],
            lambda d: weighted(32),
            1,
            "the order of a WeightedRandomSampler in this run",
        ),
    ],
    ids=["own orders", "weighted ranks", "not shared", "weighted before", "weighted now"],
)
def test_ranks_that_did_not_share_an_order_are_refused_inside_an_epoch(
    first: list[Any], then: Any, num_ranks: int, message: str
) -> None:
    data = Numbers(32)
    loaders = [DataLoader(data, 4, sampler=make(data)) for make in first]
    now = DataLoader(data, 4, sampler=then(data))
    with pytest.raises(DataPositionError, match=f"train: .*{message}.*Restore"):
        taken_up(loaders, now, num_ranks=num_ranks)
    at_the_end = taken_up(loaders, now, num_ranks=num_ranks, num_batches=8)
    assert position_of(at_the_end.source)[0] == 1


def test_a_stream_on_each_rank_is_refused_inside_an_epoch() -> None:
    class Stream:
        def __iter__(self) -> Any:
            yield from (torch.tensor([index]) for index in range(9))

    begun = [Rank(Stream()) for _ in range(2)]  # type: ignore[arg-type]
    for rank in begun:
        rank.train(2)
    states = [rank.state() for rank in begun]
    with pytest.raises(DataPositionError, match="2 ranks that each went through a loader of"):
        Rank(Stream(), states, WorldChange(0, 1, 2))  # type: ignore[arg-type]


def test_an_order_that_cannot_be_drawn_again_is_caught() -> None:
    states = [rank.state() for rank in _trained("distributed", Launch(2, 4, 3), 80)]
    for state in states:
        state["train"]["order_name"]["seed"] = 9
    rank = Rank(_with_seed(9), states, WorldChange(0, 1, 2))
    with pytest.raises(DataPositionError, match="another order"):
        rank.train(1)


def test_another_seed_is_refused() -> None:
    states = [rank.state() for rank in _trained("distributed", Launch(2, 4, 3), 80)]
    rank = Rank(_with_seed(9), states, WorldChange(0, 1, 2))
    with pytest.raises(DataPositionError, match=r"seed 9.*expected.*seed 3"):
        rank.train(1)


def _with_seed(seed: int) -> DataLoader[Any]:
    data = Numbers(80)
    sampler: Any = DistributedSampler(data, 1, 0, seed=seed)
    return DataLoader(data, 4, sampler=sampler)


def test_ranks_that_were_at_different_positions_cannot_be_sharded_again() -> None:
    ranks = start("distributed", Launch(2, 4), 80)
    states = []
    for num_batches, rank in zip((2, 3), ranks, strict=True):
        rank.train(num_batches)
        states.append(rank.state())
    with pytest.raises(DataPositionError, match=r"rank 0 was at batch 2 .*rank 1 at batch 3"):
        start("distributed", Launch(1, 4), 80, states)


# ---------------------------------------------------------------- set_epoch


def test_every_epoch_is_announced_and_the_same_call_by_the_user_is_harmless() -> None:
    def train(*, by_user: bool) -> list[list[int]]:
        rank = start("resumable", Launch(2, 4), 30)[0]
        batches = []
        for epoch in range(3):
            if by_user:
                rank.loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            batches += rank.train(None, epoch=epoch)
        return batches

    stock = make_loader("resumable", Launch(2, 4), 0, 30)
    expected = []
    for epoch in range(3):
        stock.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        expected += [batch.tolist() for batch in stock]
    assert train(by_user=False) == train(by_user=True) == expected


def test_a_batch_sampler_a_sampler_inside_it_and_the_dataset_are_reported_each_epoch_once() -> None:
    calls: list[tuple[str, int]] = []

    class RecordsData(Numbers):
        def set_epoch(self, epoch: int) -> None:
            calls.append(("dataset", epoch))

    class RecordsSampler(SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            calls.append(("sampler", epoch))

    class RecordsBatchSampler(BatchSampler):
        def set_epoch(self, epoch: int) -> None:
            calls.append(("batch sampler", epoch))

    data = RecordsData(8)
    batch_sampler = RecordsBatchSampler(RecordsSampler(data), 4, drop_last=False)
    rank = Rank(DataLoader(data, batch_sampler=batch_sampler))
    for epoch in range(3):
        rank.train(None, epoch=epoch)
    objects = ("batch sampler", "sampler", "dataset")
    assert calls == [(who, epoch) for epoch in range(3) for who in objects]


def test_around_a_framework_every_epoch_is_announced_and_the_same_call_is_harmless() -> None:
    def train(*, by_user: bool) -> tuple[list[list[int]], list[int]]:
        loader: Any = FetchesAhead(make_loader("resumable", Launch(2, 4), 0, 30), 1)
        rank = Rank(loader)
        batches = []
        for epoch in range(3):
            if by_user:
                loader.set_epoch(epoch)
            batches += rank.train(None, epoch=epoch)
        return batches, loader.epochs

    expected = start("resumable", Launch(2, 4), 30)[0]
    batches = [batch for epoch in range(3) for batch in expected.train(None, epoch=epoch)]
    assert train(by_user=False) == (batches, [0, 1, 2])
    assert train(by_user=True)[0] == batches


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["resumable", "distributed"])
def test_in_the_middle_of_an_epoch_too(kind: str, when: str) -> None:
    plan = [Launch(2, 4), Launch(1, 8)]
    for launch in plan:
        whole = start(kind, plan[0], 64)
        for rank in whole:
            rank.train(None)
            rank.train(3, epoch=1)
        states = [rank.state() for rank in whole]
        after_call, without_call = (start(kind, launch, 64, states)[0] for _ in range(2))
        sampler: Any = after_call.loader.sampler
        if when == "before":
            sampler.set_epoch(1)
        after_call.source.begin(1)
        if when == "after":
            sampler.set_epoch(1)
        rest = [after_call.source.next_batch().tolist() for _ in range(5)]
        assert rest == without_call.train(5, epoch=1)
