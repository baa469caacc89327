"""The iterators that a loop of the user or of a framework goes over; they pass the safe points.

A safe point is where all code of the finished step has run and the next batch has not been
fetched: the next ``__next__`` of the batches, or, after an epoch's last batch, of the epochs. With
several loops under way it is that of the one that leads, see ``progress.LoopOrder``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from resumekit.data.position import EpochUsage, Feed
from resumekit.data.source import Source
from resumekit.errors import DataPositionError, ResumekitError
from resumekit.run.fetch import end_resume, enter_loop
from resumekit.run.loop import Loop
from resumekit.run.progress import OwnLoop, Progress
from resumekit.run.report import ResumeReport
from resumekit.run.resume import accept_horizon, enter, find
from resumekit.run.steps_taken import CAUGHT, report_if_caught
from resumekit.state import Slot

_Given = TypeVar("_Given")


def _reports_when_caught(fetch: Callable[[Any], _Given]) -> Callable[[Any], _Given]:
    """A bare ``except`` around ``next(batches)``, to begin a loader again, catches any error."""

    @functools.wraps(fetch)
    def wrapped(loop: Any) -> _Given:
        try:
            given = fetch(loop)
        except ResumekitError as error:
            report_if_caught(error)
            raise
        if CAUGHT:
            CAUGHT.clear()  # another training has begun
        return given

    return wrapped


class Batches(OwnLoop):
    """The batches that are still to be used: of a loader, or of several in step.

    It goes over the loader as often as it was asked to: to the run's horizon, once (inside
    ``epochs()`` or another loop), or without end beside another loop (``repeat``).

    Attributes that it has not itself are those of its one loader: ``dataset``, ``batch_size``. They
    can be read; set them on the loader.

    Args:
        owner: the Checkpointer, which the script refers to, perhaps only through this.
        loop: its own.
        feed: the loader, or several.
        epochs: the run's horizon in epochs.
        steps: the same in steps.
        repeat: go over the loader without end.

    Attributes:
        initial: the batches of this loop that were used before, for a progress bar.
    """

    def __init__(
        self,
        owner: Any,
        loop: Loop,
        feed: Feed,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        repeat: bool = False,
    ) -> None:
        self._owner, self._loop = owner, loop
        loop.iterators.add(self)
        self._feed = feed
        self._epochs = epochs
        self._steps = steps
        self._repeats = repeat
        self._goes_once = epochs is None and steps is None and not repeat
        is_inner = self._goes_once and not loop.order.main
        self._least_epoch = loop.progress.epoch if is_inner else 0
        self._is_over = False
        self._is_entered = repeat  # a loader beside the loop is not one
        self._surplus: list[Any] = []  # a batch more than the loader's len() says
        self.initial = self.num_used

    @classmethod
    def of_epoch(
        cls,
        owner: Any,
        loop: Loop,
        loader: Any,
        name: str | None = None,
        *,
        repeat: bool = False,
    ) -> Batches:
        """The rest of an epoch of a loader."""
        run = loop.run
        enter(run, {})
        return cls(owner, loop, run.position.feed(loader, name, repeat=repeat), repeat=repeat)

    def __getattr__(self, name: str) -> Any:
        # Asked for what is not found otherwise. Private names are those of copy and pickle; the
        # loader's state belongs to the run; a property here may have failed.
        is_here = name in ("state_dict", "load_state_dict") or hasattr(type(self), name)
        if not (is_here or name.startswith("_")):
            loaders = {id(each.loader): each.loader for each in self._feed.sources}
            if len(loaders) == 1:
                (loader,) = loaders.values()
                return getattr(loader, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def prime(self) -> None:
        """Begins the epoch as far as some frameworks do before they ask for a batch."""
        if not self._feed.begun:
            self._loop.begin_epoch(self._feed, max(self._feed.epoch, self._least_epoch))
            self._feed.prime()

    @property
    def used_up(self) -> bool:
        """Whether the epoch under way is known to have no more batches."""
        return self._feed.used_up

    @property
    def sources(self) -> tuple[Source, ...]:
        return self._feed.sources

    @property
    def needs_no_variable(self) -> bool:
        return self._is_over or self._loop.order.leads(self._feed.names)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        """The batches of the whole loop, used or not. TypeError where nobody can know."""
        per_epoch = self._feed.num_batches
        if per_epoch is None or self._steps is not None or self._repeats:
            raise TypeError("the number of batches of this loop is not known")
        return per_epoch * (self._epochs if self._epochs is not None else 1)

    @_reports_when_caught
    def __next__(self) -> Any:
        loop, feed = self._loop, self._feed
        order, names = loop.order, feed.names
        if order.leads(names):
            loop.count_taken_step()
        if not self._is_entered:
            self._is_entered = True
            loop.begin_batches()
            enter_loop(loop.run, self._owner, feed)
        if self._is_over or not order.ask(names, follows=self._repeats):
            self._stop()
        if feed.used_up and not self._see_end():
            return self._surplus.pop()
        if order.leads(names):
            loop.pass_safe_point(self._horizon())
        if loop.finished is not None:
            loop.run.variables.hand_out(is_over=True)
            feed.close()
            self._stop()
        while True:
            if not feed.begun:
                loop.begin_epoch(feed, max(feed.epoch, self._least_epoch))
            self._set_variables()
            try:
                batch = feed.next_batch()
            except StopIteration:
                self._end_epoch()
                self._end_late()
                continue
            loop.fetched(feed, follows=self._repeats)
            return batch

    def _set_variables(self) -> None:
        """Before the first batch of a launch: sets the variables of a checkpoint."""
        variables = self._loop.run.variables
        if variables.is_waiting and self._loop.order.leads(self._feed.names):
            variables.hand_out()

    def _see_end(self) -> bool:
        """Lets the loader see its own end, where some samplers draw, as a stock loop does.

        Returns:
            Whether it is there. A sampler that yields for ever may say a length all the same; its
            batch is then in ``_surplus``, and this is no safe point.

        Raises:
            DataPositionError: it is not there, and the run's horizon is a number of epochs.
        """
        feed = self._feed
        if not feed.begun:
            self._loop.begin_epoch(feed, feed.epoch)
        try:
            self._surplus.append(feed.next_batch())
        except StopIteration:
            self._end_epoch()
            return True
        if self._epochs is not None:
            raise DataPositionError(
                feed.name,
                found=f"more than {feed.num_batches} batches in an epoch",
                expected="as many as its len() says",
                remedy="For an endless loader pass steps= instead of epochs=",
            )
        feed.has_no_end()
        self._loop.fetched(feed, follows=self._repeats)
        return False

    def _end_epoch(self) -> None:
        feed = self._feed
        if self._repeats and not feed.batch:
            raise DataPositionError(feed.name, found="an epoch without a batch")
        feed.end_epoch()
        if self._goes_once:
            self._loop.order.ended(feed.names)
            self._stop()
        if not self._repeats:
            self._loop.end_epoch(feed)

    def _stop(self) -> NoReturn:
        self._is_over = True
        raise StopIteration

    def _end_late(self) -> None:
        """The loader could not know before that this was its last batch."""
        horizon = self._horizon()
        if horizon is not None:
            self._loop.pass_safe_point(horizon, at_end=True)
            self._stop()

    def _horizon(self) -> str | None:
        """Why the run is over here, or None."""
        if self._steps is not None and self._loop.run.counters.step >= self._steps:
            return f"steps={self._steps}"
        if self._epochs is not None and self._feed.epoch >= self._epochs:
            return f"epochs={self._epochs}"
        return None

    @property
    def num_used(self) -> int:
        """The batches of this loop that were used."""
        feed, per_epoch = self._feed, self._feed.num_batches
        if self._goes_once:
            is_over = feed.epoch > self._least_epoch and not feed.batch
            return per_epoch or 0 if is_over else feed.batch
        if per_epoch is None:
            return feed.batch if self._repeats else self._loop.progress.micro_step
        return feed.epoch * per_epoch + feed.batch


class Epochs(OwnLoop):
    """The absolute numbers of the epochs that are still to be trained.

    Attributes:
        initial: the epochs that were completed before, for a progress bar.
        next_loader: what the next epoch draws from, where a framework knows it before it begins.
    """

    def __init__(self, owner: Any, loop: Loop, num_epochs: int | None) -> None:
        self._owner, self._loop = owner, loop
        loop.iterators.add(self)
        self._num_epochs = num_epochs
        self._epoch: int | None = None
        self.initial = self.num_used
        self.next_loader: Any = None

    @property
    def num_used(self) -> int:
        """The epochs that were completed."""
        return self._loop.progress.epoch

    def __iter__(self) -> Iterator[int]:
        return self

    def __len__(self) -> int:
        """The epochs of the whole loop, trained or not. TypeError where nobody here knows."""
        if self._num_epochs is None:
            raise TypeError("the number of epochs of this loop is not known")
        return self._num_epochs

    @_reports_when_caught
    def __next__(self) -> int:
        loop, variables = self._loop, self._loop.run.variables
        epoch = loop.progress.epoch if self._epoch is None else self._epoch + 1
        if self._epoch is None:
            variables.enter(self._owner, gives_batches=False)
        else:
            variables.end_epoch()
            loop.close_epoch(epoch)
            if self.next_loader is not None:
                # A new loader has what it begins with saved as well.
                loop.run.position.feed(self.next_loader)
        loop.pass_safe_point(self._horizon(epoch))
        if loop.finished is not None:
            variables.hand_out(is_over=True)
            raise StopIteration
        self._epoch = epoch
        loop.open_epoch(epoch)
        variables.begin_epoch()
        return epoch

    def _horizon(self, epoch: int) -> str | None:
        """The option that ends the run before this epoch; None if the epoch runs."""
        if self._num_epochs is not None and epoch >= self._num_epochs:
            return f"epochs={self._num_epochs}"
        return None


# ---------------------------------------------------------------- a loop that a framework runs


# This is a part of the Checkpointer: what it calls there is not the user's.
class FrameworkLoop:
    """What an adapter calls from a framework's loop, in this order.

    ``resume()`` once, when every object exists; ``next_epoch()`` and then ``batches(loader)`` for
    each epoch, the rest of the interrupted one first; ``finish()`` when the framework ends. Of the
    Checkpointer itself: ``step()`` after each optimizer step, ``report()`` after an evaluation,
    ``close()`` at the end, and ``__exit__()`` after an error.

    Args:
        owner: the Checkpointer.
        loop: its own, whose run's checkpoint is found here. Collective.
        horizon: how far the run is to go; empty where that is not known yet.
    """

    def __init__(self, owner: Any, loop: Loop, horizon: dict[str, int]) -> None:
        self._owner, self._loop = owner, loop
        run = loop.run
        run.is_driven = True
        run.owned.leave_out_variables()  # the framework's functions are on the stack
        find(run)
        self._had_finished = self.finished is not None
        if horizon:
            accept_horizon(run, horizon)
        self._epochs: Epochs | None = None
        self._batches: Batches | None = None

    @property
    def progress(self) -> Progress:
        """Where the run is, or, before ``resume()``, where it will continue."""
        return self._loop.progress

    @property
    def finished(self) -> str | None:
        """Why there is nothing left to train, or None."""
        return self._loop.finished

    @property
    def is_replay(self) -> bool:
        """Whether steps of the run are repeated, by ``resumekit replay``."""
        return self._loop.run.replay is not None

    @property
    def goes_on_after_end(self) -> bool:
        """Whether the run had finished, and is to go further now."""
        return self._had_finished and self.finished is None

    def set_log_holders(self, holders: Callable[[], Iterable[Any]]) -> None:
        """Sets what the framework logs with, see ``Trackers.holders``."""
        self._loop.run.trackers.holders = holders

    def set_cadence_text(self, text: str) -> None:
        """Sets when the framework makes saves, in the words of the first message."""
        self._loop.run.reporter.cadence = text

    def saved(self, key: str) -> Any:
        """A component's state in the checkpoint, before ``resume()`` restores it; or None.

        For what has to be made before it can take its state.
        """
        return self._loop.run.saved(key)

    def end_resume(self) -> None:
        """Restores all but the position now, and not when the epoch begins. Collective, idempotent.

        For a framework that runs code between the position of the checkpoint and that point.
        """
        end_resume(self._loop.run)

    @property
    def step_in_flight(self) -> int | None:
        """Of the save in the background; None without one. The same on all ranks."""
        return self._loop.run.in_flight.step

    def best_so_far(self) -> tuple[Path, int] | None:
        """Directory and step of the best checkpoint, or None. Waits for nothing.

        The save in flight counts; its directory is not there before it is committed.
        """
        best = self._loop.run.best_so_far()
        if best is None:
            return None
        name, _ = best
        return self._loop.run.directory / str(name), name.step

    @property
    def horizon(self) -> dict[str, int]:
        """How far the interrupted run was to go; empty where there was none."""
        return self._loop.run.counters.horizon

    def accept_horizon(
        self, settings: Mapping[str, Any] = MappingProxyType({}), /, **horizon: int
    ) -> None:
        """Takes how far the run is to go, where it was not known yet when the loop was made.

        Args:
            settings: what that follows from, under their keys in the fingerprint of this run.
            **horizon: ``steps``, ``epochs`` or both.

        Raises:
            DriftError: the interrupted run had another horizon.
        """
        accept_horizon(self._loop.run, horizon, settings)

    def under_way(self, loader: Any) -> EpochUsage:
        """The epoch that the run continues in, before anything is restored. Changes nothing.

        For a framework that counts its steps before it begins. After a change of the batch size
        these are batches of the new size.

        Raises:
            DataPositionError: the loader does not fit the position in the checkpoint.
        """
        run = self._loop.run
        return run.position.usage(loader, run.saved(Slot.DATA.value))

    def resume(self) -> ResumeReport:
        """Restores all but the data position and the random state. Collective, idempotent.

        What hooks change from here to the first batch is undone there.
        """
        report = enter(self._loop.run)
        if self._epochs is None:
            self._loop.begin_loop("epochs")
            self._epochs = Epochs(self._owner, self._loop, None)
        return report

    def next_epoch(self, loader: Any = None) -> int:
        """Passes the safe point after an epoch, and begins the next one. Collective.

        To be called when all code of the former epoch has run, and nothing of the next one.

        Args:
            loader: that of the next epoch, where it is there already: a new one in each, perhaps.

        Returns:
            The absolute number of the epoch that begins.

        Raises:
            LoopError: two epochs in a row had no optimizer step.
            StopIteration: the run has finished; look at ``finished`` first.
        """
        assert self._epochs is not None, "resume() comes first"
        self._epochs.next_loader = loader
        return next(self._epochs)

    def batches(self, loader: Any) -> Batches:
        """The batches of this epoch that are still to be used; the framework iterates them.

        Each ``__next__`` is a safe point: the framework must ask for a batch only when all code
        of the step before has run.

        Raises:
            DataPositionError: the loader does not fit the position in the checkpoint.
        """
        loader = self._loop.whole_loader(loader, None)
        self._batches = Batches.of_epoch(self._owner, self._loop, loader)
        return self._batches

    def as_loader(self, loader: Any, *, num_skipped: int = 0) -> DataLoader[Any]:
        """``batches(loader)`` as a DataLoader, for a framework that takes nothing else.

        It fetches nothing ahead, makes nothing of the batches, and draws no random number of the
        run.

        Args:
            loader: the user's loader.
            num_skipped: how many batches the framework takes and drops by itself, because they were
                used before; these are placeholders.
        """
        return _HandingLoader(_HandedDataset(self, loader, num_skipped))

    def finish(self, reason: str) -> None:
        """Records that the framework has ended the run, and saves. Collective, idempotent.

        To be called when all code of the last step has run.
        """
        used_up = self._batches is not None and self._batches.used_up
        self._loop.finish(reason, used_up=used_up)


class _HandedDataset(IterableDataset[Any]):
    """The batches of an epoch, after placeholders for those that were used before."""

    def __init__(self, loop: FrameworkLoop, loader: Any, num_skipped: int) -> None:
        self._loop = loop
        self._loader = loader
        self._num_skipped = num_skipped

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._num_skipped):
            yield None
        yield from self._loop.batches(self._loader)


class _HandingLoader(DataLoader[Any]):
    """A loader that hands its dataset's items over as they are; torch's way would cost a step more.

    A framework that makes a DataLoader of its own from this one's settings gets the same items.
    """

    def __init__(self, dataset: _HandedDataset) -> None:
        super().__init__(
            dataset, batch_size=None, collate_fn=_unchanged, generator=torch.Generator()
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own has a class
        return iter(self.dataset)


def _unchanged(batch: Any) -> Any:
    return batch
