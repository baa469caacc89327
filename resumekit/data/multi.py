"""Several loaders in one loop: as long as the shortest (zip) or as the longest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from resumekit.data.source import Source
from resumekit.errors import DataPositionError


class Zipped:
    """Loaders whose batches come together; their epoch ends with the shortest.

    What the longer ones have left is left out, and all restart with the next epoch, as they
    would in a loop over ``zip(a, b)``. Like there, the loaders before the shortest one make a batch
    that is dropped, before the end is seen.

    Args:
        sources: the loaders by name, in the order in which they are asked.
    """

    _lasts_longest = False  # its epoch is as long as the longest one's

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)
        self.names = tuple(sources)
        self.name = ", ".join(sources)  # what errors call them
        self.sources = tuple(sources.values())

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return max(source.epoch for source in self.sources)

    @property
    def batch(self) -> int:
        """Its index in the epoch."""
        return min(source.batch for source in self.sources)

    @property
    def num_batches(self) -> int | None:
        known = [each.num_batches for each in self.sources if each.num_batches is not None]
        if len(known) < len(self._sources):
            return None
        return max(known) if self._lasts_longest else min(known)

    @property
    def indices(self) -> list[Any]:
        """The sample indices of the last batches, as far as they are known."""
        return [index for source in self.sources for index in _as_list(source.indices)]

    @property
    def packed(self) -> bytes | None:
        """The same as 64-bit integers, where all of them are packed already."""
        parts = [source.packed for source in self.sources]
        return None if None in parts else b"".join(filter(None, parts))

    @property
    def num_samples(self) -> int:
        """The number of samples in the last batches."""
        return sum(source.num_samples for source in self.sources)

    @property
    def begun(self) -> bool:
        return all(source.begun for source in self.sources)

    @property
    def continues(self) -> bool:
        return any(source.continues for source in self.sources)

    @property
    def used_up(self) -> bool:
        return any(source.used_up for source in self.sources)

    def begin(self, epoch: int) -> None:
        """Starts the epoch, or continues it at the checkpoint's position.

        Raises:
            DataPositionError: the checkpoint holds a position in some of the loaders only.
        """
        continued = {name: source.continues for name, source in self._sources.items()}
        if len(set(continued.values())) > 1:
            raise DataPositionError(
                self.name,
                found="no position in "
                + ", ".join(n for n, known in continued.items() if not known),
                expected="a position in each of the loaders",
                remedy="Zip the loaders of the interrupted run; others may join at the next epoch",
            )
        for source in self.sources:
            source.begin(epoch)

    def prime(self) -> None:
        """Does nothing: no batch is fetched ahead of the epoch's first one."""

    def next_batch(self) -> dict[str, Any]:
        return {name: source.next_batch() for name, source in self._sources.items()}

    def has_no_end(self) -> None:
        for source in self.sources:
            source.has_no_end()

    def end_epoch(self) -> None:
        for source in self.sources:
            source.end_epoch()

    def close(self) -> None:
        for source in self.sources:
            source.close()


def _as_list(indices: Any) -> list[Any]:
    if indices is None:
        return []
    return list(indices) if isinstance(indices, (list, tuple)) else [indices]


@dataclass(frozen=True)
class CombinedLoaders:
    """Loaders of which each step takes a batch, as long as the longest has one.

    Args:
        loaders: by name, in the order in which they are asked.
        after_its_end: what a shorter one gives when it is used up: no more, and so None, or its
            batches once more, in another order.
    """

    loaders: Mapping[str, Any]
    after_its_end: Literal["nothing", "again"]


class Longest(Zipped):
    """Of a loader that is used up the epoch's other steps get None.

    Its position is then the start of the next epoch.
    """

    _lasts_longest = True

    @property
    def epoch(self) -> int:
        return min(source.epoch for source in self.sources)

    @property
    def batch(self) -> int:
        return max(source.batch for source in self._under_way())

    @property
    def begun(self) -> bool:
        return any(source.begun for source in self.sources)

    @property
    def used_up(self) -> bool:
        return all(source.used_up for source in self._under_way())

    def begin(self, epoch: int) -> None:
        is_continued = self.continues
        for source in self.sources:
            if source.continues or not is_continued:
                source.begin(epoch)

    def next_batch(self) -> dict[str, Any]:
        batches: dict[str, Any] = dict.fromkeys(self.names)
        over: list[Source] = []
        under_way = {name: source for name, source in self._sources.items() if source.begun}
        for name, source in under_way.items():
            try:
                batches[name] = source.next_batch()
            except StopIteration:
                over.append(source)
        if len(over) == len(under_way):
            raise StopIteration
        for source in over:
            source.end_epoch()
            source.indices, source.packed, source.num_samples = None, None, 0
        return batches

    def end_epoch(self) -> None:
        epoch = self.epoch
        for source in self.sources:
            if source.epoch == epoch:
                source.end_epoch()

    def _under_way(self) -> list[Source]:
        epoch = self.epoch
        return [source for source in self.sources if source.epoch == epoch]


class Cycling(Zipped):
    """A loader that is used up begins again, within the epoch, until all were used up once.

    All draw another order with the next epoch, wherever they are. A loader that has given fewer
    batches than there were steps has begun again.
    """

    _lasts_longest = True

    @property
    def batch(self) -> int:
        return max(source.batch for source in self.sources)

    @property
    def used_up(self) -> bool:
        steps = self.batch
        return all(source.used_up or source.batch < steps for source in self.sources)

    def next_batch(self) -> dict[str, Any]:
        steps = self.batch
        were_used_up = {name for name, each in self._sources.items() if each.batch < steps}
        batches = {}
        for name, source in self._sources.items():
            try:
                batches[name] = source.next_batch()
            except StopIteration:
                were_used_up.add(name)
                if len(were_used_up) == len(self._sources):
                    raise
                batches[name] = self._restart(source)
        return batches

    def _restart(self, source: Source) -> Any:
        epoch = source.epoch
        source.end_epoch()
        source.begin(epoch)
        return source.next_batch()
