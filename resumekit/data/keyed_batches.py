"""The indices of a batch, sent to the workers with all that keys are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from resumekit.data.keys import index_bytes
from resumekit.data.repeats import CountedOrder, Repeats, Unrepeated, gives_each_index_once
from resumekit.data.sampler import RecordingSampler


class KeyedBatch(list[Any]):
    """The indices of one batch, with all that their keys are made of.

    Args:
        given: the indices as the user's sampler gave them.
        epoch: the epoch.
        repeats: by place in the batch, how often an index came before in this epoch.
    """

    def __init__(self, given: Sequence[Any], epoch: int, repeats: Mapping[int, int]) -> None:
        super().__init__(given)
        self.given = given
        self.epoch = epoch
        self.repeats = repeats

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedBatch, (self.given, self.epoch, self.repeats)

    def contents(self) -> list[bytes]:
        """What tells each sample from all others of the epoch."""
        contents = [index_bytes(index) for index in self]
        for place, times in self.repeats.items():
            contents[place] += b"#" + index_bytes(times)
        return contents


class KeyedSampler(RecordingSampler):
    """Yields what the user's index sampler yields, as batches from which keys can be made.

    Args:
        loader: the user's loader.
        recording: the arguments of a RecordingSampler.
    """

    def __init__(self, loader: DataLoader[Any], *recording: Any) -> None:
        super().__init__(*recording)
        self._epoch = 0
        self._begun: Iterator[Any] | None = None
        self._loader = loader
        self._collates = loader.batch_sampler is not None
        self._repeats: Repeats = Unrepeated()

    def begin(self, epoch: int) -> None:
        """The next iteration is that of this epoch."""
        self._epoch, self._begun = epoch, None

    def __iter__(self) -> Iterator[Any]:
        # torch 2.13 utils/data/dataloader.py _MultiProcessingDataLoaderIter asks twice when it is
        # made. A sampler that draws when it is asked would draw once more than without workers.
        if self._begun is None:
            self._begun = self._begin()
        return self._begun

    def _begin(self) -> Iterator[Any]:
        begins_again = self._seek is not None
        once = gives_each_index_once(self._loader)
        self._repeats = Unrepeated() if once else Repeats(_num_samples(self._loader))
        batches = super().__iter__()
        if not begins_again:
            # torch 2.13 utils/data/dataloader.py _BaseDataLoaderIter draws a seed for its workers
            # here; persistent workers draw one in a process. Here it is one in each epoch, so that
            # what follows is the same for any workers. The loader draws from one of its own.
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        return batches

    def _indices(
        self, inner: Iterator[Any], place: tuple[int, Iterator[Any]] | None
    ) -> Iterator[Any]:
        for indices in super()._indices(inner, place):
            given = indices if self._collates else [indices]
            yield KeyedBatch(given, self._epoch, self._repeats.count(given))

    def _find_place(self, inner: Iterator[Any]) -> tuple[int, Iterator[Any]]:
        order = self.order
        self.order = CountedOrder(order, self._repeats)
        place = super()._find_place(inner)
        self.order = order
        return place


def _num_samples(loader: DataLoader[Any]) -> int:
    try:
        return len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return 0
