"""The iterators that a training loop is written over; they pass the settled points.

A settled point is where all code of the finished step has run and the next batch has not been
fetched: the next ``__next__`` of the batches, or, after an epoch's last batch, of the epochs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from resumekit.contract import Progress
from resumekit.data import Source
from resumekit.errors import DataPositionError


class LoopOwner(Protocol):
    """What the loops tell, and ask, the one who saves and resumes.

    ``finished`` says why the run is over, or is None.
    """

    @property
    def progress(self) -> Progress: ...

    @property
    def finished(self) -> str | None: ...

    def _open_epoch(self, epoch: int) -> None: ...

    def _close_epoch(self, epoch: int) -> None: ...

    def _begin(self, source: Source, epoch: int) -> None: ...

    def _fetched(self, source: Source) -> None: ...

    def _epoch_ended(self, source: Source) -> None: ...

    def _count_taken_step(self) -> None: ...

    def _settle(self, finished: str | None, *, at_end: bool = False) -> None: ...


class Batches:
    """The batches that are still to be used, over one epoch or over the whole run.

    Attributes:
        initial: the batches of this loop that were used before, for a progress bar.
    """

    def __init__(
        self,
        run: LoopOwner,
        source: Source,
        *,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> None:
        self._run = run
        self._source = source
        self._epochs = epochs
        self._steps = steps
        self._inside_epochs = epochs is None and steps is None
        self._epoch = run.progress.epoch
        self.initial = self._used()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        """The batches of the whole loop, used or not. TypeError where nobody can know."""
        per_epoch = self._source.num_batches
        if per_epoch is None or self._steps is not None:
            raise TypeError("the number of batches of this loop is not known")
        return per_epoch * (self._epochs if self._epochs is not None else 1)

    def __next__(self) -> Any:
        if self._source.used_up:
            self._exhaust()
        if not self._inside_epochs or self._source.begun:
            self._run._settle(self._horizon())
        if self._run.finished is not None:
            self._source.close()
            raise StopIteration
        while True:
            self._begin_if_needed()
            try:
                batch = self._source.next_batch()
            except StopIteration:
                self._epoch_ended()
                self._settle_late()
                continue
            self._run._fetched(self._source)
            return batch

    def _begin_if_needed(self) -> None:
        if self._source.begun:
            return
        epoch, _ = self._source.place()
        if self._inside_epochs:
            if epoch > self._epoch:
                raise StopIteration  # this loader's part of the epoch was used up before
            epoch = self._epoch
        self._run._begin(self._source, epoch)

    def _exhaust(self) -> None:
        """Lets the loader see its own end, where some samplers draw, as a stock loop does."""
        try:
            self._source.next_batch()
        except StopIteration:
            self._epoch_ended()
            return
        raise DataPositionError(
            self._source.name,
            found=f"more than {self._source.num_batches} batches in an epoch",
            expected="as many as its len() says",
        )

    def _epoch_ended(self) -> None:
        self._source.end_epoch()
        self._run._epoch_ended(self._source)
        if self._inside_epochs:
            raise StopIteration

    def _settle_late(self) -> None:
        """The loader could not tell before that this was its last batch."""
        horizon = self._horizon()
        if horizon is not None:
            self._run._settle(horizon, at_end=True)
            raise StopIteration

    def _horizon(self) -> str | None:
        """Why the run is over at this place, or None."""
        self._run._count_taken_step()
        if self._steps is not None and self._run.progress.step >= self._steps:
            return f"steps={self._steps}"
        if self._epochs is not None and self._source.place()[0] >= self._epochs:
            return f"epochs={self._epochs}"
        return None

    def _used(self) -> int:
        per_epoch = self._source.num_batches or 0
        epoch, batch = self._source.place()
        if self._inside_epochs:
            return batch if epoch == self._epoch else per_epoch
        return epoch * per_epoch + batch


class Epochs:
    """The absolute numbers of the epochs that are still to be trained.

    Attributes:
        initial: the epochs that were completed before, for a progress bar.
    """

    def __init__(self, run: LoopOwner, num_epochs: int | None) -> None:
        self._run = run
        self._num_epochs = num_epochs
        self._epoch: int | None = None
        self.initial = run.progress.epoch

    def __iter__(self) -> Iterator[int]:
        return self

    def __len__(self) -> int:
        """The epochs of the whole loop, trained or not. TypeError where nobody here knows."""
        if self._num_epochs is None:
            raise TypeError("the number of epochs of this loop is not known")
        return self._num_epochs

    def __next__(self) -> int:
        run = self._run
        epoch = run.progress.epoch if self._epoch is None else self._epoch + 1
        if self._epoch is not None:
            run._close_epoch(epoch)
        run._settle(self._horizon(epoch))
        if run.finished is not None:
            raise StopIteration
        self._epoch = epoch
        run._open_epoch(epoch)
        return epoch

    def _horizon(self, epoch: int) -> str | None:
        """Why the run is over before this epoch, or None."""
        if self._num_epochs is not None and epoch >= self._num_epochs:
            return f"epochs={self._num_epochs}"
        return None
