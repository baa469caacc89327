"""The position in all loaders of a run, as one component of its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from resumekit.contract import Fidelity
from resumekit.data.map_source import MapSource
from resumekit.data.replay import ReplaySource
from resumekit.data.source import Source
from resumekit.data.wrapped import INNER, WrappedSource
from resumekit.errors import ConfigurationError


class DataPosition:
    """The loaders that the loops opened, by name, and the one that fetched last.

    A checkpoint's position is kept until the loop opens the loader of that name.
    """

    def __init__(self) -> None:
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
        source = open_source(loader, name)
        if name in self._pending:
            source.load_state_dict(self._pending.pop(name))
        self.sources[name] = source
        self._loaders[name] = loader
        return source

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        """How exactly the positions come back: the least exact loader's word."""
        order = list(Fidelity)
        words = [source.fidelity for source in self.sources.values()]
        return max(words, key=lambda word: order.index(word[0]), default=(Fidelity.EXACT, ""))

    def restore_generators(self) -> None:
        """Sets every loader's private generators to what they were at the checkpoint."""
        for source in self.sources.values():
            source.restore_generators()

    def state_dict(self) -> dict[str, Any]:
        """The place in every loader; one that was not opened again keeps the place it had."""
        states = dict(self._pending)
        states.update({name: source.state_dict() for name, source in self.sources.items()})
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the places; each is found when its epoch begins."""
        self._pending = dict(state)


def open_source(loader: Any, name: str) -> Source:
    """The source of a loader: exact seeking for map-style DataLoaders, replay for the rest."""
    if _is_map_style(getattr(loader, INNER, None)):
        return WrappedSource(loader, name)
    return MapSource(loader, name) if _is_map_style(loader) else ReplaySource(loader, name)


def _is_map_style(loader: Any) -> bool:
    return (
        isinstance(loader, DataLoader)
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader, "state_dict")
    )
