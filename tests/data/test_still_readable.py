"""What a suspended iterator can still read is found, also where CPython's internals move."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from resumekit.data.loader_traits import sample_iterator
from resumekit.data.stream_objects import still_readable

SAMPLES = [1.5, 2.5, 3.5]


class Stream(IterableDataset[float]):
    def __init__(self, body: Callable[[Any], Iterator[float]]) -> None:
        self.body = body
        self.items = [*SAMPLES]

    def __iter__(self) -> Iterator[float]:
        return self.body(self)


def at_start(self: Any) -> Iterator[float]:
    samples = list(self.items)
    yield from samples


def in_a_loop(self: Any) -> Iterator[float]:
    samples = [self.items[i] for i in range(3)]
    for sample in samples:
        yield sample * 2


def with_a_closure(self: Any) -> Iterator[float]:
    def read(index: int) -> float:
        return float(self.items[index])

    samples = [read(i) for i in range(3)]
    del read
    yield from samples


def with_cleanup(self: Any) -> Iterator[float]:
    samples = list(self.items)
    try:
        yield from samples
    finally:
        samples.clear()


@pytest.mark.parametrize("body", [at_start, in_a_loop, with_cleanup])
def test_a_generator_that_has_read_all_reads_its_own_values(body: Any) -> None:
    stream = Stream(body)
    iterator = iter(stream)
    next(iterator)
    read = still_readable(iterator)
    assert SAMPLES in read
    assert not reads(stream, read)


def while_it_goes(self: Any) -> Iterator[float]:
    for index in range(3):
        yield self.items[index]


def back_in_the_outer_loop(self: Any) -> Iterator[float]:
    for _ in range(3):
        samples = list(self.items)
        for sample in samples:
            yield sample * 2


def at_its_end(self: Any) -> Iterator[float]:
    try:
        yield from SAMPLES
    finally:
        self.items.clear()


def by_a_list(self: Any) -> Iterator[float]:
    yield from self.items


def by_a_generator(self: Any) -> Iterator[float]:
    yield from (each for each in self.items)


def by_a_method(self: Any) -> Iterator[float]:
    yield from map(self.items.__getitem__, range(3))


def by_a_partial(self: Any) -> Iterator[float]:
    yield from map(partial(getitem, self), range(3))


def by_a_function(self: Any) -> Iterator[float]:
    def read(index: int) -> float:
        return float(self.items[index])

    yield from (read(i) for i in range(3))


def getitem(stream: Any, index: int) -> Any:
    return stream.items[index]


def without_a_generator(self: Any) -> Iterator[float]:
    return enumerate(self.items)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "body",
    [
        while_it_goes,
        back_in_the_outer_loop,
        at_its_end,
        by_a_list,
        by_a_generator,
        by_a_method,
        by_a_partial,
        by_a_function,
        without_a_generator,
    ],
)
def test_a_generator_that_reads_on_is_known(body: Any) -> None:
    stream = Stream(body)
    iterator = iter(stream)
    next(iterator)
    assert reads(stream, still_readable(iterator))


def test_a_closure_that_is_gone_counts_as_one_that_reads() -> None:
    stream = Stream(with_a_closure)
    iterator = iter(stream)
    next(iterator)
    assert SAMPLES in still_readable(iterator)


def test_a_generator_that_is_over_reads_nothing() -> None:
    iterator = iter(Stream(at_start))
    assert list(iterator) == SAMPLES
    assert still_readable(iterator) == []


def test_the_iterator_of_a_dataset_is_found_in_the_one_of_its_loader() -> None:
    stream = Stream(at_start)
    iterator = iter(DataLoader(stream, batch_size=2))
    assert sample_iterator(iterator).gi_code is at_start.__code__
    assert sample_iterator(stream) is stream


def reads(stream: Stream, read: list[Any]) -> bool:
    return any(each is stream or each is stream.items for each in read)
