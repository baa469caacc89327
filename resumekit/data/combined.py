"""Several loaders of other lengths: an epoch that lasts as long as the longest of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from resumekit.data.source import Source
from resumekit.data.zipped import Zipped


@dataclass(frozen=True)
class Together:
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

    Its place is then the start of the next epoch.
    """

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return min(source.epoch for source in self.sources)

    @property
    def batch(self) -> int:
        """Its index in the epoch."""
        return max(source.batch for source in self._under_way())

    @property
    def num_batches(self) -> int | None:
        """The batches of one epoch, or None where one of the loaders does not say."""
        return _longest(self.sources)

    @property
    def begun(self) -> bool:
        """Whether an epoch is under way in this process."""
        return any(source.begun for source in self.sources)

    @property
    def used_up(self) -> bool:
        """Whether the epoch under way is known to have no more batches."""
        return all(source.used_up for source in self._under_way())

    def begin(self, epoch: int) -> None:
        """Starts the epoch, or continues it where the checkpoint stood."""
        goes_on = self.continues
        for source in self.sources:
            if source.continues or not goes_on:
                source.begin(epoch)

    def next_batch(self) -> dict[str, Any]:
        """The next batch of every loader by name, None of one that has no more.

        Raises:
            StopIteration: none of them has any.
        """
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
            source.indices, source.num_samples = None, 0
        return batches

    def end_epoch(self) -> None:
        """Moves the place of every loader to the start of the next epoch."""
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

    @property
    def batch(self) -> int:
        """Its index in the epoch."""
        return max(source.batch for source in self.sources)

    @property
    def num_batches(self) -> int | None:
        """The batches of one epoch, or None where one of the loaders does not say."""
        return _longest(self.sources)

    @property
    def used_up(self) -> bool:
        """Whether the epoch under way is known to have no more batches."""
        steps = self.batch
        return all(source.used_up or source.batch < steps for source in self.sources)

    def next_batch(self) -> dict[str, Any]:
        """The next batch of every loader, by name.

        Raises:
            StopIteration: all of them were used up.
        """
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
                batches[name] = self._first_again(source)
        return batches

    def _first_again(self, source: Source) -> Any:
        epoch = source.epoch
        source.end_epoch()
        source.begin(epoch)
        return source.next_batch()


def _longest(sources: tuple[Source, ...]) -> int | None:
    lengths = [source.num_batches for source in sources]
    known = [length for length in lengths if length is not None]
    return max(known) if len(known) == len(lengths) else None
