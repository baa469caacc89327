"""What the fit loop iterates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader

from resumekit.adapters._lightning_package import CombinedLoader, DataFetcher, ModeIterator
from resumekit.adapters._lightning_settings import refuse
from resumekit.capture import RngState
from resumekit.data import AskedAhead, Together


class Driver(Protocol):
    """Who knows where the fit is; asked when Lightning makes an iterator."""

    def begin(self, loader: Any) -> Any:
        """The batches of the epoch that begins."""
        ...

    @property
    def is_followed(self) -> bool:
        """Whether this fit is; a tuner tries some batches on its own."""
        ...

    @property
    def is_before_start(self) -> bool:
        """Whether nobody knows yet whether something is restored: ``on_fit_start`` has not come."""
        ...

    @property
    def is_at_start(self) -> bool:
        """Whether nothing was restored, and nothing trained."""
        ...


class LoaderInStep(CombinedLoader):
    """What the fit loop iterates: the user's loader, through the driven loop.

    ``setup_data`` asks for an iterator before an epoch has begun. At the start of a run it is made
    then; in a run that continues nothing may happen there, because loaders draw random numbers.

    Args:
        given: what Lightning would iterate.
        driver: knows where the fit is.
        draws_twice: whether Lightning would make the first epoch's iterators a second time.
    """

    def __init__(self, given: Any, driver: Driver, *, draws_twice: bool) -> None:
        is_combined = isinstance(given, CombinedLoader)
        mode: Any = given._mode if is_combined else "max_size_cycle"
        super().__init__(given.iterables if is_combined else given, mode)
        self._driver = driver
        self._draws_twice = draws_twice
        self._batches: Any = None  # of the epoch under way
        self._is_primed = False  # that is the first one, and nobody has asked for a batch
        self._before_seed: dict[str, Any] | None = None  # the random state, where one was drawn
        self.fetcher: Fetcher | None = None

    def __iter__(self) -> Any:
        if not self._driver.is_followed:
            return super().__iter__()
        waits = self.is_asked_ahead and self.fetcher is None
        batches = iter(()) if waits else self._side_by_side()
        self._iterator = _InStep(self.flattened, self._length(), batches)
        if self._draws_twice:
            self._draws_twice = False
            self._draw()
        elif self._driver.is_before_start and all(map(_draws_a_seed, self.flattened)):
            self._before_seed = RngState().state_dict()
            for _ in self.flattened:
                torch.empty((), dtype=torch.int64).random_()
        elif self._driver.is_at_start and not self._is_primed:
            self._prime()
        return self

    def follow(self, loop: Any) -> None:
        """The fit loop is about to ask for batches of this loader."""
        if self.is_asked_ahead and loop._data_fetcher is not self.fetcher:
            loop._data_fetcher = Fetcher(self)
        elif not isinstance(self._iterator, _InStep):  # a tuner's
            iter(loop._data_fetcher)
        elif self._before_seed is not None and self._driver.is_at_start and not self._is_primed:
            self._prime()

    def _prime(self) -> None:
        """Begins the first epoch, with the random state that Lightning made iterators under."""
        now, rng = None, RngState()
        if self._before_seed is not None:
            now = rng.state_dict()
            rng.load_state_dict(self._before_seed)
        self._begin()
        self._batches.prime()
        self._is_primed = True
        if now is not None:
            rng.load_state_dict(now)

    def _draw(self) -> None:
        for loader in self.flattened:
            batches = iter(loader)
            if self.is_asked_ahead:
                next(batches, None)

    def _state_dicts(self) -> list[dict[str, Any]]:
        """Nothing for Lightning's own checkpoints: asked, a stateful loader may draw a number."""
        return []

    @property
    def is_asked_ahead(self) -> bool:
        """Whether nobody knows the last batch before the next one was asked for."""
        return self._length() == math.inf

    @property
    def used_up(self) -> bool:
        """Whether the batch that was handed out is the last one."""
        return bool(self._batches.used_up)

    def _length(self) -> float:
        """The batches of an epoch; ``limits`` has the lengths of the loaders, cut to the limit."""
        limits = self.limits or [math.inf]
        return min(limits) if self._mode == "min_size" else max(limits)

    def _side_by_side(self) -> Iterator[list[Any]]:
        """The batches of an epoch; it begins when the first one is asked for."""
        if not self._is_primed:
            self._begin()
        self._is_primed = False
        named = len(self.flattened) > 1
        for batch in self._batches:
            yield list(batch.values()) if named else [batch]

    def _begin(self) -> None:
        loaders: Any = self.flattened  # as Lightning has prepared them
        together: Any = {str(number): loader for number, loader in enumerate(loaders)}
        if len(loaders) == 1:
            together = AskedAhead(loaders[0]) if self.is_asked_ahead else loaders[0]
        elif self.is_asked_ahead:
            what = f"several training loaders without a length (mode {self._mode})"
            refuse(what, True, "nobody knows which of them ends the epoch; set limit_train_batches")
        elif self._mode != "min_size":
            together = Together(together, "nothing" if self._mode == "max_size" else "again")
        self._batches = self._driver.begin(together)


def _draws_a_seed(loader: Any) -> bool:
    """Whether its iterator draws one number when it is made, and nothing else before a batch.

    torch 2.13 utils/data/dataloader.py ``_BaseDataLoaderIter``; with workers the sampler draws too.
    """
    return type(loader) is DataLoader and loader.generator is None and not loader.num_workers


class Fetcher(DataFetcher):
    """What the epoch loop takes batches from where nobody knows how many there are.

    Lightning fetches one ahead, to know the last one, and here that is done where the place is
    kept. lightning 2.6 loops/fetchers.py ``_PrefetchDataFetcher``.
    """

    def __init__(self, loader: LoaderInStep) -> None:
        super().__init__()
        loader.fetcher = self
        self.setup(loader)
        iter(self)

    def __next__(self) -> Any:
        batch = super().__next__()
        loader: Any = self.combined_loader
        self.done = loader.used_up
        return batch


class _InStep(ModeIterator):
    """Batches that are already side by side, where Lightning combines loaders by itself."""

    def __init__(self, loaders: Any, length: float, batches: Iterator[list[Any]]) -> None:
        super().__init__(loaders)
        self._length: Any = length
        self._batches = batches

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        batches = next(self._batches)
        self._idx += 1
        return batches, self._idx - 1, 0

    def __len__(self) -> int:
        """TypeError, as for any float, where nobody knows it."""
        return self._length  # type: ignore[no-any-return]
