"""A loader that cannot tell its last batch, asked for one batch more than was handed out."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from resumekit.data.outer import OuterSource
from resumekit.data.source import Source


@dataclass(frozen=True)
class AskedAhead:
    """How some frameworks draw from a loader without a length: see ``AheadSource``.

    Args:
        loader: the user's loader.
    """

    loader: Any


@dataclass(frozen=True)
class _Fetched:
    """The batch that was asked for and not handed out yet, and where it came from.

    Args:
        batch: it.
        place: the inner source's state before the fetch.
        random: the random state before the fetch; None where samples draw from keys.
        indices: the batch's sample indices.
        num_samples: their number.
    """

    batch: Any
    place: dict[str, Any]
    random: dict[str, Any] | None
    indices: Any
    num_samples: int


class AheadSource(OuterSource):
    """Fetches the next batch before it hands one out, and so knows which is the last of an epoch.

    The place is that of the batch that was fetched and not handed out. A resume fetches it once
    more, from the random state that it was fetched from.

    Args:
        inner: the source that it draws from.
    """

    kind = "ahead"

    def __init__(self, inner: Source) -> None:
        super().__init__(inner.loader, inner.name, inner)
        self._private, self._rng = inner._private, inner._rng
        self._is_ahead = False  # of the epoch under way a batch was asked for
        self._fetched: _Fetched | None = None  # the batch that is ahead, while there is one

    @property
    def keyed(self) -> bool:  # type: ignore[override]
        """Whether samples draw from keys, and so not from the run's state."""
        return self._inner.keyed

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
        self._is_ahead, self._fetched = again, None
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
        fetched = self._fetched
        self._fetch()
        self.indices, self.num_samples = fetched.indices, fetched.num_samples
        self.batch += 1
        return fetched.batch

    def _fetch(self) -> None:
        inner = self._inner
        place, random = inner.state_dict(), None if inner.keyed else self._rng.state_dict()
        self._fetched = None
        with suppress(StopIteration):
            batch = inner.next_batch()
            self._fetched = _Fetched(batch, place, random, inner.indices, inner.num_samples)

    def end_epoch(self) -> None:
        """Moves the place to the start of the next epoch."""
        super().end_epoch()
        self._is_ahead, self._fetched = False, None

    def close(self) -> None:
        """Lets go of the iterator; the place stays."""
        super().close()
        self._inner.close()

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
