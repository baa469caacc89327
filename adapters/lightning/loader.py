"""The loader that the fit loop iterates, and what is known of the user's loaders."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from resumekit import Progress
from resumekit.adapters.lightning import _private as private
from resumekit.adapters.lightning._private import CombinedLoader, DataFetcher, ModeIterator
from resumekit.capture.rng import RngState
from resumekit.data.prefetching import PrefetchedLoader
from resumekit.data.source import CombinedLoaders
from resumekit.errors import ConfigurationError
from resumekit.run.loops import FrameworkLoop
from resumekit.state import Fidelity


def refuse(what: str, is_there: bool, why: str) -> None:
    """Refuses a setting.

    Raises:
        ConfigurationError: it is there.
    """
    if is_there:
        raise ConfigurationError("ResumeCallback", found=f"{what}: {why}")


@contextmanager
def under_rng_state(state: Mapping[str, Any] | None) -> Iterator[None]:
    """Runs code with another RNG state and restores the present one; None changes nothing."""
    rng = RngState()
    now = None if state is None else rng.state_dict()
    if state is not None:
        rng.load_state_dict(state)
    yield
    if now is not None:
        rng.load_state_dict(now)


class LoaderInStep(CombinedLoader):
    """What the fit loop iterates: the user's loader, through the driven loop.

    ``setup_data`` asks for an iterator before an epoch has begun. At the start of a run it is made
    then; in a resumed run nothing may happen there, because loaders draw random numbers.

    Args:
        given: what Lightning would iterate.
        is_followed: whether the fit is saved; a tuner tries some batches without callbacks.
        loop: gives the driven loop; None before ``on_fit_start``.
        begin: gives the batches of an epoch that begins.
        draws_twice: whether Lightning would make the first epoch's iterators a second time.
    """

    def __init__(
        self,
        given: Any,
        *,
        is_followed: Callable[[], bool],
        loop: Callable[[], FrameworkLoop | None],
        begin: Callable[[Any], Any],
        draws_twice: bool,
    ) -> None:
        is_combined = isinstance(given, CombinedLoader)
        mode: Any = private.MODE.of(given) if is_combined else "max_size_cycle"
        super().__init__(given.iterables if is_combined else given, mode)
        self._combines = mode
        self._is_followed = is_followed
        self._loop = loop
        self._begin_epoch = begin
        self._draws_twice = draws_twice
        self._batches: Any = None  # of the current epoch
        self._is_primed = False  # that is the first one, and no batch was requested yet
        self._before_seed: dict[str, Any] | None = None  # the RNG state, where a seed was drawn
        self.fetcher: Fetcher | None = None

    def __iter__(self) -> Any:
        if not self._is_followed():
            return super().__iter__()
        waits = self.is_asked_ahead and self.fetcher is None
        batches = iter(()) if waits else self._combined()
        self._iterator = _InStep(self.flattened, self._length(), batches)
        if self._draws_twice:
            self._draws_twice = False
            self._draw()
        elif self._loop() is None and all(map(_draws_a_seed, self.flattened)):
            self._before_seed = RngState().state_dict()
            for _ in self.flattened:
                torch.empty((), dtype=torch.int64).random_()
        elif self._is_at_start and not self._is_primed:
            self._prime()
        return self

    def follow(self, trainer: Any) -> None:
        """The fit loop is about to ask for batches of this loader."""
        if self.is_asked_ahead and private.FETCHER.of(trainer) is not self.fetcher:
            private.FETCHER.write(trainer, Fetcher(self))
        elif not isinstance(self._iterator, _InStep):  # a tuner's
            iter(private.FETCHER.of(trainer))
        elif self._before_seed is not None and self._is_at_start and not self._is_primed:
            self._prime()

    @property
    def _is_at_start(self) -> bool:
        """Whether nothing was restored and nothing trained."""
        loop = self._loop()
        return loop is not None and loop.progress == Progress()

    def _prime(self) -> None:
        """Begins the first epoch, with the RNG state that Lightning made iterators under."""
        with under_rng_state(self._before_seed):
            self._begin()
            self._batches.prime()
        self._is_primed = True

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
        """Whether the last batch is only known when the next one is requested."""
        return self._length() == math.inf

    @property
    def used_up(self) -> bool:
        """Whether the batch that was handed out is the last one."""
        return bool(self._batches.used_up)

    def _length(self) -> float:
        """The batches of an epoch; ``limits`` has the lengths of the loaders, cut to the limit."""
        limits = self.limits or [math.inf]
        return min(limits) if self._combines == "min_size" else max(limits)

    def _combined(self) -> Iterator[list[Any]]:
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
            together = PrefetchedLoader(loaders[0]) if self.is_asked_ahead else loaders[0]
        elif self.is_asked_ahead:
            what = f"several training loaders without a length (mode {self._combines})"
            refuse(
                what, True, "it is unknown which of them ends the epoch; set limit_train_batches"
            )
        elif self._combines != "min_size":
            together = CombinedLoaders(
                together, "nothing" if self._combines == "max_size" else "again"
            )
        self._batches = self._begin_epoch(together)


def _draws_a_seed(loader: Any) -> bool:
    """Whether its iterator draws one number when it is made, and nothing else before a batch.

    torch 2.13 utils/data/dataloader.py ``_BaseDataLoaderIter``; with workers the sampler draws too.
    """
    return type(loader) is DataLoader and loader.generator is None and not loader.num_workers


class Fetcher(DataFetcher):
    """What the epoch loop takes batches from where their number is unknown.

    Lightning fetches one ahead, to know the last one; here the data position does that.
    lightning 2.6 loops/fetchers.py ``_PrefetchDataFetcher``.
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
    """Batches that are combined already, where Lightning combines loaders itself."""

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
        """TypeError, as for any float, where it is unknown."""
        return self._length  # type: ignore[no-any-return]


# ---------------------------------------------------------------- the user's loaders


def loader_fidelity(trainer: Any) -> tuple[Fidelity, str]:
    """Whether the work of persistent workers is restored; some loaders are known later."""
    validation = _given(trainer, is_training=False) if trainer.limit_val_batches else ()
    if any(map(_keeps_workers, validation)):
        return Fidelity.LOST, (
            "the RNG states of persistent workers of a loader for validation are not restored; use "
            "persistent_workers=False there"
        )
    kept = filter(_keeps_workers, _given(trainer, is_training=True))
    if not all(_is_used_up(each, trainer.limit_train_batches) for each in kept):
        return Fidelity.LOST, (
            "batches that persistent workers made beyond limit_train_batches are not made again; "
            "use persistent_workers=False"
        )
    return Fidelity.EXACT, ""


def _given(trainer: Any, *, is_training: bool) -> list[Any]:
    """The loaders that ``fit`` was given, or that a hook has made so far."""
    source = (private.TRAIN_SOURCE if is_training else private.VALIDATION_SOURCE).of(trainer)
    if not source.is_module():
        return list(CombinedLoader(source.instance).flattened)
    loader = (private.TRAIN_LOADER if is_training else private.VALIDATION_LOADER).of(trainer)
    return [] if loader is None else list(loader.flattened)


def _keeps_workers(loader: Any) -> bool:
    return bool(getattr(loader, "persistent_workers", False))


def _is_used_up(loader: Any, limit: int | float) -> bool:
    """Whether an epoch takes all of its batches."""
    if isinstance(limit, float):
        return limit >= 1.0
    return isinstance(loader.dataset, Sized) and limit >= len(loader)
