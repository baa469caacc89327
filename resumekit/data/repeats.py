"""How often each index came before in an epoch: sampling with replacement gives some twice.

The first time and the second are two samples, and are to draw other random numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from resumekit.data.keys import index_bytes
from resumekit.data.resumable import DistributedResumableSampler, ResumableSampler
from resumekit.data.sampler import Order

_ONCE = (
    SequentialSampler,
    DistributedSampler,  # what it pads with goes to another rank than before
    ResumableSampler,
    DistributedResumableSampler,
)


def gives_each_index_once(loader: DataLoader[Any]) -> bool:
    """Whether nothing has to be counted; of samplers that are not torch's or ours nobody knows."""
    batching: Any = loader.batch_sampler
    if type(batching) not in (BatchSampler, type(None)):
        return False
    sampler = loader.sampler if batching is None else batching.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in _ONCE


class Repeats:
    """Counts the indices of one epoch on this rank.

    Args:
        num_samples: the length of the dataset, 0 where it has none.
    """

    def __init__(self, num_samples: int) -> None:
        self._seen = bytearray(num_samples)  # a dict of all of them would outgrow the permutation
        self._times: dict[bytes, int] = {}

    def count(self, indices: Iterable[Any]) -> dict[int, int]:
        """By place, how often an index came before, for those that did."""
        counted = {place: self._count(index) for place, index in enumerate(indices)}
        return {place: times for place, times in counted.items() if times}

    def _count(self, index: Any) -> int:
        first = 0
        try:
            if not self._seen[index]:
                self._seen[index] = 1
                return 0
            first = 1
        except (TypeError, IndexError):
            pass  # an index that is no number below the length
        content = index_bytes(index)
        times = self._times.get(content, first)
        self._times[content] = times + 1
        return times


class Unrepeated(Repeats):
    """Where every index comes once, there is nothing to count."""

    def __init__(self, num_samples: int = 0) -> None:
        super().__init__(0)

    def count(self, indices: Iterable[Any]) -> dict[int, int]:
        """None came before."""
        return {}


class CountedOrder(Order):
    """An order that counts what it takes in.

    Args:
        order: takes it in as well.
        repeats: counts it.
    """

    def __init__(self, order: Order, repeats: Repeats) -> None:
        super().__init__(order._digest)
        self._repeats = repeats

    def add(self, indices: Any) -> None:
        """Takes in what is passed over, a series of indices."""
        super().add(indices)
        self._repeats.count(indices)
