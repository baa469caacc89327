"""A framework's loader around a DataLoader, which fetches batches before it hands them out."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from resumekit.data.crossing import WRAPPED, into
from resumekit.data.inheritance import CROSSED
from resumekit.data.kinds import INNER, around
from resumekit.data.map_source import MapSource, Mark
from resumekit.data.outer import OuterSource
from resumekit.data.source import announce_epoch
from resumekit.errors import DataPositionError


@dataclass(frozen=True)
class Fetched:
    """A batch that the outer loader has taken and not handed out yet, and where it came from.

    Args:
        place: the inner source's, before the fetch.
        random: the random state before the fetch; None where samples draw from keys.
        indices: the batch's sample indices.
        num_samples: their number.
    """

    place: Mark
    random: dict[str, Any] | None
    indices: Any
    num_samples: int


class WrappedSource(OuterSource):
    """A loader that draws from a map-style DataLoader and may be some batches ahead of the loop.

    What counts is the place of the inner loader before the first batch that was not handed out. A
    resume fetches the batches ahead once more, each from the random state that it was fetched from
    before, and hands them to the outer loader. The user's loader is left as it is; a shallow copy
    is iterated, around an inner loader of our own.

    Args:
        loader: the framework's loader.
        name: what the run calls it.
        open_inner: gives the source of the loader inside.
    """

    kind = WRAPPED
    _inner: MapSource

    def __init__(
        self, loader: Any, name: str, open_inner: Callable[[Any, str], MapSource] = MapSource
    ) -> None:
        inner = getattr(loader, INNER)
        super().__init__(loader, name, open_inner(inner, name))
        self._outer = around(loader, _Feed(self, inner))
        self._ahead: deque[Fetched] = deque()
        self._again: deque[Any] = deque()  # batches fetched anew, for the outer loader to take
        self._continues = False  # the epoch under way was begun by another process
        self._settled: dict[str, Any] = {}  # the random state that it continues from

    def begin(self, epoch: int) -> None:
        """Starts the epoch, or continues it where the checkpoint stood."""
        announce_epoch(self._outer, epoch)
        pending, self._pending = self._pending, None
        self._ahead.clear()
        self.epoch, self.batch = epoch, 0
        self._continues = False
        if pending is not None and pending["epoch"] == epoch and pending["batch"] > 0:
            self._begin_again(pending)
        else:
            self._epoch_batches = None
        self._iterator = iter(()) if self._is_at_end(pending) else iter(self._outer)

    def _is_at_end(self, pending: Mapping[str, Any] | None) -> bool:
        """Whether nothing is left, and the inner loader has come to its end."""
        if self.epoch_batches is None or not 0 < self.epoch_batches <= self.batch:
            return False
        # An outer loader that has handed out everything has seen the end of the inner one.
        return pending is None or CROSSED not in pending["inner"]

    def _begin_again(self, pending: Mapping[str, Any]) -> None:
        """Fetches anew what was ahead; the generators are set afterwards."""
        self._continues = True
        self.batch = pending["batch"]
        if self._is_at_end(pending):
            return
        self._inner.begin(self.epoch)
        for random in pending["ahead"]:
            if self._inner.used_up:
                break  # batches are larger now, and fewer
            if random is not None:
                self._rng.load_state_dict(random)
            self._again.append(self._fetch())

    def next_batch(self) -> Any:
        """The next batch as the user's loader would give it.

        Raises:
            StopIteration: the epoch has no more.
            DataPositionError: the outer loader made a batch without drawing one.
        """
        assert self._iterator is not None
        if self._continues:
            self._settled = self._rng.state_dict()
        batch = next(self._iterator)
        if not self._ahead:
            raise DataPositionError(
                self.name,
                found=f"a batch of {type(self.loader).__name__} that this rank did not draw",
                expected="one batch from its inner loader for each that it hands out",
            )
        handed_out = self._ahead.popleft()
        self.indices, self.num_samples = handed_out.indices, handed_out.num_samples
        self.batch += 1
        return batch

    def _begin_inner(self) -> None:
        """The outer loader makes its iterator, at its own first batch."""
        if self._continues:
            # What it drew or synchronised just now, it did in the interrupted run as well.
            self._rng.load_state_dict(self._settled)
            self._continues = False
        else:
            self._inner.begin(self.epoch)

    def _take(self) -> Any:
        """The next batch for the outer loader."""
        return self._again.popleft() if self._again else self._fetch()

    def _fetch(self) -> Any:
        place = self._inner.mark()
        random = None if self._inner.keyed else self._rng.state_dict()
        batch = self._inner.next_batch()
        fetched = Fetched(place, random, self._inner.indices, self._inner.num_samples)
        self._ahead.append(fetched)
        return batch

    def end_epoch(self) -> None:
        """Moves the place to the start of the next epoch."""
        self._ahead.clear()
        super().end_epoch()

    def _crossed(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The place of the loader inside, before a framework had prepared it."""
        inner = {id(generator): name for name, generator in self._inner.private.items()}
        names = {inner[id(each)]: name for name, each in self._private.items() if id(each) in inner}
        return into(state, self._inner.kind, self._geometry(), names, where=self.name)

    def _fitted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        fitted = super()._fitted(state)
        self._epoch_batches = self._inner._epoch_batches
        return fitted

    def state_dict(self) -> dict[str, Any]:
        """The place of the next batch, and what the batches ahead were fetched from."""
        if self._pending is not None:
            return dict(self._pending)
        inner = self._inner
        return {
            **self._state(),
            "inner": inner.state_at(self._ahead[0].place) if self._ahead else inner.state_dict(),
            "ahead": [fetched.random for fetched in self._ahead],
        }


class _Feed:
    """What the outer loader takes for its inner one: the same, but every batch comes from us.

    It does not keep the source alive: workers of a loader that goes in a cycle of references are
    waited for, 5 seconds each. torch 2.13 utils/data/dataloader.py ``_shutdown_workers``.
    """

    def __init__(self, source: WrappedSource, loader: Any) -> None:
        self._source = weakref.proxy(source)
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._source._begin_inner()
        return self

    def __next__(self) -> Any:
        return self._source._take()
