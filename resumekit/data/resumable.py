"""Drop-in samplers whose place in an epoch is found at once, however long the epoch is."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sized
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler

from resumekit.data.permutation import VERSION, EpochOrder, InOrder, Permutation, share
from resumekit.errors import ConfigurationError


@runtime_checkable
class RandomAccess(Protocol):
    """A sampler that can begin an epoch at any place; one of your own is sought in like ours."""

    def iterate_from(self, position: int) -> Iterator[int]:
        """This rank's indices from where all ranks together have used ``position`` samples."""
        ...

    def order_name(self) -> dict[str, Any]:
        """What names the epoch's order, in plain values: equal for equal orders."""
        ...


class ResumableSampler(Sampler[int]):
    """Every index once an epoch, in an order that seed, epoch and length name.

    A drop-in for ``RandomSampler`` and, with ``shuffle=False``, for ``SequentialSampler``. It draws
    from no generator and holds no permutation, so any place of an epoch is found at once.

    Args:
        data_source: what ``len()`` can be asked of.
        shuffle: False gives 0, 1, 2, ...
        seed: names the order, together with the epoch.
    """

    def __init__(self, data_source: Sized, *, shuffle: bool = True, seed: int = 0) -> None:
        self.data_source = data_source
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Names the epoch whose order the next iteration gives; the loops of resumekit call it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[int]:
        """The epoch's indices from a position on."""
        return share(draw(self.order_name()), position=position)

    def order_name(self) -> dict[str, Any]:
        """What names the epoch's order, in plain values."""
        return name_of(len(self.data_source), self)


class DistributedResumableSampler(DistributedSampler[int]):
    """One rank's share of the order that seed, epoch and length name.

    A drop-in for ``DistributedSampler``, which it also is for whoever asks. Ranks take turns, and
    what cannot be divided is padded or dropped as there. The order is that of ``ResumableSampler``
    with the same seed, whatever the number of ranks.

    Args:
        data_source: what ``len()`` can be asked of.
        num_replicas: the ranks that share it; by default all of the job.
        rank: this rank; by default the process's own.
        shuffle: False gives 0, 1, 2, ...
        seed: names the order, together with the epoch; the same on all ranks.
        drop_last: leave out the tail that cannot be divided, instead of padding it.

    Raises:
        ConfigurationError: neither given nor known how many ranks there are.
        ValueError: a rank outside of them.
    """

    def __init__(
        self,
        data_source: Sized,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        if num_replicas is None:
            num_replicas = _num_ranks()
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        super().__init__(
            data_source,  # type: ignore[arg-type]  # torch asks for its length alone
            num_replicas=num_replicas,
            rank=rank,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    def __iter__(self) -> Iterator[int]:
        return self.iterate_from(0)

    def iterate_from(self, position: int) -> Iterator[int]:
        """This rank's indices from where all ranks together have used ``position`` samples."""
        return share(
            draw(self.order_name()),
            position=position,
            num_replicas=self.num_replicas,
            replica=self.rank,
            drop_last=self.drop_last,
        )

    def order_name(self) -> dict[str, Any]:
        """What names the epoch's order, in plain values: the same on every rank."""
        return name_of(len(self.dataset), self)  # type: ignore[arg-type]


def name_of(length: int, sampler: Any) -> dict[str, Any]:
    """The name of the order that a sampler of this length gives in its epoch."""
    if not sampler.shuffle:
        return {"kind": "in order", "length": length}
    return {
        "kind": "keyed",
        "version": VERSION,
        "length": length,
        "seed": int(sampler.seed),
        "epoch": int(sampler.epoch),
    }


def draw(name: dict[str, Any]) -> EpochOrder:
    """The order of that name, with access to any place."""
    if name["kind"] == "in order":
        return InOrder(name["length"])
    return Permutation(name["length"], seed=name["seed"], epoch=name["epoch"])


def _num_ranks() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    announced = int(os.environ.get("WORLD_SIZE", "1"))
    if announced > 1:
        raise ConfigurationError(
            "num_replicas",
            found=f"torch.distributed is not initialised, while WORLD_SIZE={announced}",
            expected="one process group over all ranks",
            remedy="Call init_process_group before the sampler is made, or give num_replicas, rank",
        )
    return 1
