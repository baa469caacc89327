"""A loader that cannot tell its last batch, asked for one batch more than was handed out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resumekit.contract import Fidelity
from resumekit.data.elastic import RANKS, follow
from resumekit.data.generators import without_prefetch
from resumekit.data.source import Source
from resumekit.data.wrapped import Fetched


@dataclass(frozen=True)
class AskedAhead:
    """How some frameworks draw from a loader without a length: see ``AheadSource``.

    Args:
        loader: the user's loader.
    """

    loader: Any


class AheadSource(Source):
    """Fetches the next batch before it hands one out, and so knows which is the last of an epoch.

    The place is that of the batch that was fetched and not handed out. A resume fetches it once
    more, from the random state that it was fetched from.

    Args:
        inner: the source that it draws from.
    """

    kind = "ahead"

    def __init__(self, inner: Source) -> None:
        super().__init__(inner.loader, inner.name)
        self._inner = inner
        self._private, self._rng = inner._private, inner._rng
        self._is_ahead = False  # of the epoch under way a batch was asked for
        self._batch: Any = None
        self._fetched: Fetched | None = None  # the batch that is ahead, while there is one

    @property
    def keyed(self) -> bool:  # type: ignore[override]
        """Whether samples draw from keys, and so not from the run's state."""
        return self._inner.keyed

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """How exactly the position and the random numbers in it come back, and why not."""
        return self._inner.fidelity

    @property
    def num_batches(self) -> int | None:
        """None: what is known of it is not to be relied on."""
        return None

    @property
    def used_up(self) -> bool:
        """Whether the epoch under way is known to have no more batches."""
        if self._pending is not None:
            return self.continues and not self._pending["ahead"]
        return self.begun and self._is_ahead and self._fetched is None

    def begin(self, epoch: int) -> None:
        """Starts the epoch, or continues it where the checkpoint stood."""
        pending, self._pending = self._pending, None
        again = pending is not None and pending["epoch"] == epoch and pending["batch"] > 0
        self._inner.begin(epoch)
        self._iterator = iter(())
        self.epoch, self.batch = epoch, 0
        self._is_ahead, self._fetched, self._batch = again, None, None
        if pending is not None and again:
            self.batch = pending["batch"]
            for random in pending["ahead"]:
                if random is not None:
                    self._rng.load_state_dict(random)
                self._fetch()

    def prime(self) -> None:
        """Fetches what is fetched ahead of the epoch's first batch."""
        if not self._is_ahead:
            self._is_ahead = True
            self._fetch()

    def next_batch(self) -> Any:
        """The next batch as the user's loader would give it.

        Raises:
            StopIteration: the epoch has no more.
        """
        self.prime()
        if self._fetched is None:
            raise StopIteration
        batch, fetched = self._batch, self._fetched
        self._fetch()
        self.indices, self.num_samples = fetched.indices, fetched.num_samples
        self.batch += 1
        return batch

    def _fetch(self) -> None:
        inner = self._inner
        place, random = inner.state_dict(), None if inner.keyed else self._rng.state_dict()
        self._fetched = self._batch = None
        try:
            self._batch = inner.next_batch()
        except StopIteration:
            return
        self._fetched = Fetched(place, random, inner.indices, inner.num_samples)

    def drawn_again(self) -> tuple[Any, ...]:
        """The private generators that are in place already: the order was drawn from them again."""
        return self._inner.drawn_again()

    def end_epoch(self) -> None:
        """Moves the place to the start of the next epoch."""
        super().end_epoch()
        self._inner.end_epoch()
        self._is_ahead, self._fetched, self._batch = False, None, None

    def close(self) -> None:
        """Lets go of the iterator; the place stays."""
        super().close()
        self._inner.close()

    def _fitted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        inner = self._inner
        inner.allowed_changes = self.allowed_changes
        inner.load_state_dict({**state["inner"], **{k: state[k] for k in (RANKS,) if k in state}})
        self.changed, self.changes = inner.changed, inner.changes
        return follow(
            {**state, "inner": inner.state_dict()},
            self._geometry(),
            needed=inner.changed,
            where=self.name,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the place that a checkpoint holds; it is found when the epoch begins."""
        super().load_state_dict(state)
        if self._pending is None:
            self._inner.end_epoch()  # another loader begins an epoch

    def state_dict(self) -> dict[str, Any]:
        """The place of the next batch, and the random state that it was fetched from, if it was."""
        if self._pending is not None:
            return dict(self._pending)
        fetched = self._fetched
        return {
            **self._state(),
            "inner": self._inner.state_dict() if fetched is None else fetched.place,
            "ahead": [] if fetched is None else [fetched.random],
        }

    def comparable_state(self) -> dict[str, Any]:
        """What two equal runs have in common: the state, without how far ahead workers are."""
        state = self.state_dict()
        if not self._inner.keyed:
            return state
        return {**without_prefetch(state), "inner": without_prefetch(state["inner"])}
