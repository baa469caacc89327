"""Several loaders in step: each iteration takes one batch of every one, as ``zip`` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resumekit.data.source import Source
from resumekit.errors import DataPositionError


class Zipped:
    """Loaders whose batches come together; their epoch ends with the shortest.

    What the longer ones have left is left out, and all begin anew with the next epoch, as they
    would in a loop over ``zip(a, b)``. Like there, the loaders before the shortest one make a batch
    that nobody gets, before the end is seen.

    Args:
        sources: the loaders by name, in the order in which they are asked.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)

    @property
    def name(self) -> str:
        """What errors call them."""
        return ", ".join(self._sources)

    @property
    def names(self) -> tuple[str, ...]:
        """What the run calls them."""
        return tuple(self._sources)

    @property
    def sources(self) -> tuple[Source, ...]:
        """The loaders."""
        return tuple(self._sources.values())

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
        """The batches of one epoch, or None where one of the loaders does not say."""
        lengths = [source.num_batches for source in self.sources]
        known = [length for length in lengths if length is not None]
        return min(known) if len(known) == len(lengths) else None

    @property
    def indices(self) -> list[Any]:
        """The sample indices of the last batches, as far as the loaders tell."""
        return [index for source in self.sources for index in _as_list(source.indices)]

    @property
    def num_samples(self) -> int:
        """The number of samples in the last batches."""
        return sum(source.num_samples for source in self.sources)

    @property
    def begun(self) -> bool:
        """Whether an epoch is under way in this process."""
        return all(source.begun for source in self.sources)

    @property
    def continues(self) -> bool:
        """Whether ``begin`` will go on inside an epoch that another process began."""
        return any(source.continues for source in self.sources)

    @property
    def used_up(self) -> bool:
        """Whether the epoch under way is known to have no more batches."""
        return any(source.used_up for source in self.sources)

    def begin(self, epoch: int) -> None:
        """Starts the epoch, or continues it where the checkpoint stood.

        Raises:
            DataPositionError: the checkpoint holds a place in some of the loaders only.
        """
        going_on = {name: source.continues for name, source in self._sources.items()}
        if len(set(going_on.values())) > 1:
            raise DataPositionError(
                self.name,
                found=f"no place in {', '.join(n for n, known in going_on.items() if not known)}",
                expected="a place in each of the loaders",
                remedy="Zip the loaders of the interrupted run; others may join at the next epoch",
            )
        for source in self.sources:
            source.begin(epoch)

    def prime(self) -> None:
        """Fetches what is fetched ahead of the epoch's first batch: nothing."""

    def next_batch(self) -> dict[str, Any]:
        """The next batch of every loader, by name.

        Raises:
            StopIteration: one of them has no more.
        """
        return {name: source.next_batch() for name, source in self._sources.items()}

    def has_no_end(self) -> None:
        """The batches of this epoch are more than the ``len()`` of some of the loaders says."""
        for source in self.sources:
            source.has_no_end()

    def end_epoch(self) -> None:
        """Moves the place of every loader to the start of the next epoch."""
        for source in self.sources:
            source.end_epoch()

    def close(self) -> None:
        """Lets go of the iterators; the places stay."""
        for source in self.sources:
            source.close()


def _as_list(indices: Any) -> list[Any]:
    if indices is None:
        return []
    return list(indices) if isinstance(indices, (list, tuple)) else [indices]
