"""An order that no RNG state gives again is saved where it lies in a list, and checked if not."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from resumekit.capture.rng import RngState
from resumekit.capture.user_state.walk import content_digest
from resumekit.data.position import DataPosition
from resumekit.data.seeking import pack_order, packed_integers, rest_of, unpack_order
from resumekit.errors import DataPositionError
from resumekit.serialization.digests import state_digest
from resumekit.state import Fidelity

ORDER = [5, 3, 8, 1, 9]


def loop(order: Any) -> Iterator[Any]:
    for index in order:  # noqa: UP028 - the bytecode is another one
        yield index


def delegates(order: Any) -> Iterator[Any]:
    yield from order


SEEN: dict[str, Callable[[], Any]] = {
    "list": lambda: iter(ORDER),
    "tuple": lambda: iter(tuple(ORDER)),
    "array": lambda: iter(np.array(ORDER)),
    "tensor": lambda: iter(torch.tensor(ORDER)),
    "loop": lambda: loop(ORDER),
    "yield from": lambda: delegates(ORDER),
    "yield from a loop": lambda: delegates(loop(ORDER)),
    "generator expression": lambda: (index for index in ORDER),
}


@pytest.mark.parametrize("kind", SEEN)
@pytest.mark.parametrize("num_used", [1, 3, 5])
def test_what_an_iterator_has_left_is_seen_and_not_used(kind: str, num_used: int) -> None:
    iterator = SEEN[kind]()
    for _ in range(num_used):
        next(iterator)
    rest = rest_of(iterator)
    assert rest is not None
    assert [int(each) for each in rest] == ORDER[num_used:]
    assert [int(each) for each in iterator] == ORDER[num_used:]


def draws(order: list[int]) -> Iterator[int]:
    while order:
        yield order.pop(random.randrange(len(order)))


def changes(order: list[int]) -> Iterator[int]:
    for index in order:
        yield index + 1


def leaves_out(order: list[int]) -> Iterator[int]:
    for index in order:
        if index != 8:
            yield index


def in_two_parts(order: list[int]) -> Iterator[int]:
    yield from order
    yield from order


def counts(order: list[int], counter: list[int]) -> Iterator[int]:
    yield from order
    counter.append(1)


def gives_another(order: list[int]) -> Iterator[int]:
    for index in order:
        index = 7
        yield index


def from_a_map(order: list[int]) -> Iterator[int]:
    unused = iter([2, 2, 2])  # noqa: F841 - it must not be taken for what is given
    for index in map(abs, order):  # noqa: UP028
        yield index


UNSEEN: dict[str, Callable[[], Any]] = {
    "draws": lambda: draws([*ORDER]),
    "changes": lambda: changes(ORDER),
    "leaves out": lambda: leaves_out(ORDER),
    "in two parts": lambda: in_two_parts(ORDER),
    "does something at its end": lambda: counts(ORDER, []),
    "gives another": lambda: gives_another(ORDER),
    "from a map": lambda: from_a_map(ORDER),
    "chain": lambda: itertools.chain(ORDER, ORDER),
    "reversed": lambda: reversed(ORDER),
}


@pytest.mark.parametrize("kind", UNSEEN)
def test_what_may_depend_on_more_is_not_taken_for_seen(kind: str) -> None:
    iterator = UNSEEN[kind]()
    next(iterator)
    assert rest_of(iterator) is None


@pytest.mark.parametrize(
    "items",
    [
        ORDER,
        list(np.array(ORDER)),
        list(torch.tensor(ORDER)),
        [[5, 3], [8], [1, 9]],
    ],
    ids=["int", "int64", "tensor", "lists"],
)
def test_a_saved_order_gives_items_of_the_same_types(items: list[Any]) -> None:
    given = [packed_integers(each) for each in items[:2]]
    saved = pack_order(given, items[2:], items[1])
    assert saved is not None
    again = list(iter(unpack_order(saved)))
    assert again == items
    assert [type(each) for each in again] == [type(each) for each in items]


@pytest.mark.parametrize("items", [["a", "b"], [1.0, 2.0], [(1, 2), (3,)], [1, np.int64(2)]])
def test_what_is_no_index_is_not_saved(items: list[Any]) -> None:
    assert pack_order([], items[1:], items[0]) is None


# ---------------------------------------------------------------- checked when a save begins


class Rows(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a dataset is never copied")


class Weighted(Sampler[int]):
    """Draws an index when it is asked for it, by weights; not copied with its dataset."""

    def __init__(self, data: Any) -> None:
        self.data_source = data
        self.weights = torch.ones(len(data), dtype=torch.float64)
        self.generator = torch.Generator().manual_seed(7)
        self.num_iterations = 0

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        self.num_iterations += 1
        for _ in range(len(self)):
            yield int(torch.multinomial(self.weights, 1, generator=self.generator))


class FromNumPy(Weighted):
    """The same from NumPy's global generator, which training draws from as well."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(len(self)):
            yield int(np.random.randint(len(self)))


class Elsewhere(Weighted):
    def __iter__(self) -> Iterator[int]:
        order = random.SystemRandom().sample(range(len(self)), len(self))
        return map(int, order)


class Uncopyable(Weighted):
    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.lock = threading.Lock()


def after(
    make: Callable[[Any], Any], num_batches: int = 5, **settings: Any
) -> tuple[DataPosition, Any]:
    """A position after some batches, and the sampler."""
    data = Rows(60)
    given = make(data)
    position = DataPosition()
    source = position.open(DataLoader(data, 4, sampler=given, **settings), "train")
    source.begin(0)
    for _ in range(num_batches):
        source.next_batch()
        np.random.rand(3)
    return position, given


CHECKED: dict[str, Callable[[Any], Any]] = {
    "random": RandomSampler,
    "generator": lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(5)),
    "with replacement": lambda data: RandomSampler(data, replacement=True),
    "weighted": lambda data: WeightedRandomSampler([1.0] * len(data), len(data)),
    "draws as it goes": Weighted,
    "from numpy": FromNumPy,
}


@pytest.mark.parametrize("kind", CHECKED)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_check_finds_the_order_and_changes_nothing(kind: str, workers: int) -> None:
    position, sampler = after(CHECKED[kind], num_workers=workers)
    before = state_of(sampler)
    position.before_save()
    assert position.fidelity[0] is Fidelity.EXACT
    assert state_of(sampler) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_keeps_the_rng_state_of_the_start_of_the_epoch(workers: int) -> None:
    torch.manual_seed(1)
    position, _ = after(Weighted, num_workers=workers)
    saved = copy.deepcopy(position.state_dict())
    again = DataPosition()
    again.load_state_dict(saved)
    data = Rows(60)
    loader = DataLoader(data, 4, sampler=Weighted(data), num_workers=workers)
    torch.manual_seed(2)
    again.open(loader, "train").begin(0)
    assert state_of_start(again.state_dict()) == state_of_start(saved)
    other = copy.deepcopy(saved)
    other["train"]["start"]["at_iter"]["torch"][40] += 1
    assert state_of_start(other) != state_of_start(saved)


def state_of_start(state: Any) -> Any:
    start = {n: each for n, each in state["train"]["start"].items() if each is not None}
    return content_digest(start, limit_bytes=2**20)


def test_an_order_that_is_known_at_its_end_is_the_same_after_a_resume() -> None:
    data = Rows(24)  # six whole batches: the sampler has given all before it is asked once more

    def source(position: DataPosition) -> Any:
        sampler = RandomSampler(data, replacement=True)
        return position.open(DataLoader(data, 4, sampler=sampler, num_workers=2), "train")

    torch.manual_seed(1)
    position, again = DataPosition(), DataPosition()
    whole = source(position)
    whole.begin(0)
    orders = []
    for _ in range(4):
        orders.append(position.state_dict()["train"].get("order"))
        whole.next_batch()
    assert orders[2] is None  # 24 indices were fetched ahead, also before the third batch
    saved = position.state_dict()
    assert saved["train"]["order"] is not None
    again.load_state_dict(copy.deepcopy(saved))
    torch.manual_seed(2)
    source(again).begin(0)
    assert state_digest(again.state_dict()) == state_digest(saved)


def test_an_order_whose_end_was_fetched_ahead_is_found() -> None:
    """Accelerate's sampler is in the next epoch then, and its shards read to the end of a round."""
    accelerate = pytest.importorskip("accelerate.data_loader")
    data = Rows(23)
    sampler = accelerate.SeedableRandomSampler(data, generator=torch.Generator(), data_seed=3)
    for inner in (
        BatchSampler(sampler, 2, drop_last=False),
        accelerate.BatchSamplerShard(BatchSampler(sampler, 2, drop_last=False), 4, 3),
    ):
        position = DataPosition()
        loader = accelerate.DataLoaderShard(data, batch_sampler=inner)
        source = position.open(loader, "train")
        source.begin(0)
        for _ in range(len(inner) - 1):
            source.next_batch()
        assert sampler.epoch == 1
        position.before_save()
        assert position.fidelity[0] is Fidelity.EXACT
        assert sampler.epoch == 1


def state_of(sampler: Any) -> Any:
    attributes = {name: each for name, each in vars(sampler).items() if name != "data_source"}
    return content_digest([RngState().state_dict(), attributes], limit_bytes=2**20)


@pytest.mark.parametrize("kind", [Elsewhere, Uncopyable])
def test_an_order_that_is_not_found_again_is_unknown_at_the_first_save(kind: Any) -> None:
    position, sampler = after(kind)
    assert position.fidelity[0] is Fidelity.EXACT  # nobody knows yet
    before = str(RngState().state_dict()), vars(sampler).copy()
    position.before_save()
    fidelity, reason = position.fidelity
    assert fidelity is Fidelity.UNKNOWN
    assert reason.startswith(kind.__name__)
    assert "let __iter__ return iter() of a list" in reason
    assert str(RngState().state_dict()) == before[0]
    assert all(vars(sampler)[name] is each for name, each in before[1].items())


def test_weights_that_training_changes_are_noticed_when_the_order_is_drawn_as_it_goes() -> None:
    position, sampler = after(Weighted)
    position.before_save()
    assert position.fidelity == (Fidelity.EXACT, "")
    sampler.weights[:30] = 0
    position.before_save()
    fidelity, _ = position.fidelity
    assert fidelity is Fidelity.UNKNOWN


@pytest.mark.parametrize("workers", [0, 2])
def test_weights_that_training_changes_are_no_matter_once_the_order_is_drawn(workers: int) -> None:
    class Drawn(Weighted):
        def __iter__(self) -> Iterator[int]:
            num = len(self)
            return iter(
                torch.multinomial(self.weights, num, True, generator=self.generator).tolist()
            )

    position, sampler = after(Drawn, num_workers=workers)
    sampler.weights[:30] = 0
    position.before_save()
    assert position.fidelity[0] is Fidelity.EXACT
    saved = copy.deepcopy(position.state_dict())
    (source,) = position.sources.values()
    expected = [source.next_batch().tolist() for _ in range(10)]

    def rest(state: Any) -> list[Any]:
        again = DataPosition()
        again.load_state_dict(state)
        data = Rows(60)
        drawn = Drawn(data)
        drawn.weights[:30] = 0  # as it was when the checkpoint was written
        resumed = again.open(DataLoader(data, 4, sampler=drawn, num_workers=workers), "train")
        resumed.begin(0)
        return [resumed.next_batch().tolist() for _ in range(10)]

    assert rest(saved) == expected
    lacking = copy.deepcopy(saved)
    lacking["train"]["order"] = None
    with pytest.raises(DataPositionError, match="another order"):
        rest(lacking)


def test_a_batch_sampler_is_seen_through() -> None:
    class Batches(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            order = random.SystemRandom().sample(range(60), 60)
            yield from [order[first : first + 4] for first in range(0, 60, 4)]

    def source(state: Any = None) -> Any:
        position = DataPosition()
        position.load_state_dict(state or {})
        loader = DataLoader(Rows(60), batch_sampler=Batches(range(60), 4, drop_last=False))
        opened = position.open(loader, "train")
        opened.begin(0)
        return position, opened

    position, opened = source()
    for _ in range(15):
        opened.next_batch()
        position.before_save()
        assert position.fidelity[0] is Fidelity.UNKNOWN  # how the next order is drawn
        if opened.batch == 5:
            saved = copy.deepcopy(position.state_dict())
    order = position.state_dict()["train"]["order"]["indices"].tolist()
    expected = [order[first : first + 4] for first in (20, 24, 28)]
    again, resumed = source(saved)
    assert [resumed.next_batch().tolist() for _ in range(3)] == expected
    assert resumed.batch == 8
    assert again.state_dict()["train"]["order"]["lengths"].tolist() == [4] * 15


def test_an_order_with_a_name_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    position, _ = after(RandomSampler)
    checks: list[Any] = []
    monkeypatch.setattr(
        position.sources["train"], "_draw_again", lambda *given: checks.append(given)
    )
    position.before_save()
    position.before_save()
    assert len(checks) == 1
