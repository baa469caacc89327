"""The position in all loaders of a run, as one component of its state."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from resumekit.contract import Fidelity, WorldChange
from resumekit.data.keyed import KeyedSource, KeyedStatefulMapSource
from resumekit.data.keys import RunSeed
from resumekit.data.kinds import INNER, is_stateful_data_loader
from resumekit.data.map_source import MapSource
from resumekit.data.ranks import resplit_places
from resumekit.data.replay import ReplaySource
from resumekit.data.source import Source
from resumekit.data.stateful import StatefulMapSource, StatefulSource, keeps_its_own_place
from resumekit.data.wrapped import WrappedSource
from resumekit.errors import ConfigurationError


class DataPosition:
    """The loaders that the loops opened, by name, and the one that fetched last.

    A checkpoint's position is kept until the loop opens the loader of that name.

    Args:
        seed: what keys are made from; None where random numbers are not keyed.
        allowed_changes: what of a loader's geometry the user allows to change.

    Attributes:
        changes: what of it did change, in words, in the order in which the loaders were opened.
    """

    def __init__(
        self, seed: RunSeed | None = None, *, allowed_changes: Collection[str] = ()
    ) -> None:
        self._seed = seed
        self._allowed_changes = frozenset(allowed_changes)
        self.changes: list[str] = []
        self.sources: dict[str, Source] = {}
        self._loaders: dict[str, Any] = {}
        self._pending: dict[str, Any] = {}

    def open(self, loader: Any, name: str) -> Source:
        """The source of this loader; the same one as before when the loop opens it again.

        Raises:
            ConfigurationError: another loader is open under this name.
            DataPositionError: the checkpoint's position does not fit the loader.
        """
        known = self.sources.get(name)
        if known is not None:
            if self._loaders[name] is not loader:
                raise ConfigurationError(
                    f"batches(name={name!r})",
                    found="a second loader under one name",
                    remedy="Give each loader its own name=, and build it once, before the loop",
                )
            return known
        source = open_source(loader, name, self._seed)
        source.allowed_changes = self._allowed_changes
        if name in self._pending:
            source.load_state_dict(self._pending[name])
            del self._pending[name]
            self.changes += source.changes
        self.sources[name] = source
        self._loaders[name] = loader
        return source

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """How exactly the positions come back: the least exact loader's word."""
        order = list(Fidelity)
        words = [self._word(source) for source in self.sources.values()]
        return max(words, key=lambda word: order.index(word[0]), default=(Fidelity.EXACT, ""))

    def _word(self, source: Source) -> tuple[Fidelity, str]:
        fidelity, reason = source.fidelity
        if self._seed is None or source.keyed or fidelity is Fidelity.EXACT:
            return fidelity, reason
        return fidelity, f"{reason}; randomness='keyed' does not reach it: a stream has no indices"

    def drawn_again(self) -> list[Any]:
        """The private generators that are in place already: an order was drawn from them again."""
        return [each for source in self.sources.values() for each in source.drawn_again()]

    def restore_generators(self) -> None:
        """Sets every loader's private generators to what they were at the checkpoint."""
        for source in self.sources.values():
            source.restore_generators()

    def state_dict(self) -> dict[str, Any]:
        """The place in every loader; one that was not opened again keeps the place it had."""
        states = dict(self._pending)
        states.update({name: source.state_dict() for name, source in self.sources.items()})
        return states

    def comparable_state(self) -> dict[str, Any]:
        """What two equal runs have in common; they may have other numbers of workers."""
        states = {name: source.comparable_state() for name, source in self.sources.items()}
        return {**self._pending, **states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the places; each is found when its epoch begins."""
        self._pending = dict(state)

    def resplit_state_dict(
        self, states: Mapping[int, Mapping[str, Any]], change: WorldChange
    ) -> tuple[dict[str, Any], tuple[str, ...]]:
        """The places for this rank of a job with another number of ranks.

        Raises:
            DataPositionError: the former ranks were not at one place.
        """
        return resplit_places(states, change)


def open_source(loader: Any, name: str, seed: RunSeed | None = None) -> Source:
    """The source of a loader: exact seeking for map-style DataLoaders, replay for the rest.

    Args:
        loader: the user's loader.
        name: what the run calls it.
        seed: what keys are made from; None where random numbers are not keyed.
    """
    open_map = MapSource if seed is None else partial(KeyedSource, seed=seed)
    if _is_map_style(getattr(loader, INNER, None)):
        return WrappedSource(loader, name, open_map)
    if is_stateful_data_loader(loader) and not isinstance(loader.dataset, IterableDataset):
        if seed is not None:
            return KeyedStatefulMapSource(loader, name, seed)
        return StatefulMapSource(loader, name)
    if keeps_its_own_place(loader):
        return StatefulSource(loader, name)
    return open_map(loader, name) if _is_map_style(loader) else ReplaySource(loader, name)


def _is_map_style(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "state_dict")
    )
