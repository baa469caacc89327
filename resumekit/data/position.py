"""The position in all loaders of a run, as one component of its state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from resumekit.capture.user_state.user_state import UserState
from resumekit.data.iterable import ReplaySource
from resumekit.data.keyed import KeyedSource, RunSeed
from resumekit.data.loader_changes import resplit_positions
from resumekit.data.loader_traits import (
    MAP,
    STATEFUL,
    WRAPPED,
    ExistingObjects,
    LoaderTraits,
    without_history,
)
from resumekit.data.map_style import MapSource
from resumekit.data.position_state import PositionState
from resumekit.data.prefetching import PrefetchedLoader, PrefetchingSource, WrappedSource
from resumekit.data.source import CombinedLoaders, Cycling, Longest, Source, Zipped
from resumekit.data.stateful import StatefulSource
from resumekit.data.stream_objects import LoaderContent
from resumekit.errors import ConfigurationError, DataPositionError
from resumekit.state import BeforeSave, Checked, Fidelity, Resplit, Slot, WorldChange

# What one loop draws from.
Feed: TypeAlias = Source | Zipped


DEFAULT_NAME = "train"


class EpochUsage(NamedTuple):
    """How much of the epoch that a run continues in was used, in batches of this run's loader.

    ``num_left`` is None where the loader does not say how many there are.
    """

    num_used: int
    num_left: int | None


PASS_WHOLE_LOADER = "Pass the loader itself: batches() continues at the next unseen batch"


@dataclass(frozen=True)
class SkippedLoader:
    """A loader whose first batches of the epoch the script skips: those that the run has used.

    Args:
        loader: the whole one.
        num_batches: how many it skips.
    """

    loader: Any
    num_batches: int

    def check(self, source: Source) -> None:
        """Raises DataPositionError unless that is where the run continues.

        Args:
            source: of the whole loader.

        Raises:
            DataPositionError: with both numbers.
        """
        if self.num_batches != source.batch:
            raise DataPositionError(
                source.name,
                found=f"a loader that skips {self.num_batches} batches of epoch {source.epoch}",
                expected=f"{source.batch}, the position of the run",
                remedy=PASS_WHOLE_LOADER,
            )


class DataPosition(Checked, BeforeSave):
    """The loaders that the loops opened, by name.

    A checkpoint's position is kept until the loop opens the loader of that name.

    Args:
        seed: what keys are made from; None where random numbers are not keyed.
        allowed_changes: what of a loader's geometry the user allows to change.

    Attributes:
        follow_content: makes the user state of what a loader is built from; None where the loader
            was there before the epoch.
        changes: what of it did change, in words, in the order in which the loaders were opened.
        unexpected: what else the script has changed in a loader between two epochs.
    """

    schema = dict[str, PositionState]

    def __init__(
        self, seed: RunSeed | None = None, *, allowed_changes: Collection[str] = ()
    ) -> None:
        self._seed = seed
        self._allowed_changes = frozenset(allowed_changes)
        self.changes: list[str] = []
        self.unexpected: list[str] = []
        self.sources: dict[str, Source] = {}
        self._opened_in: dict[str, int] = {}
        self._num_epochs = 0  # of epochs() that ended in this process
        self._pending: dict[str, Any] = {}
        self._in_checkpoint: frozenset[str] = frozenset()
        self._existing: ExistingObjects | None = None
        self.follow_content: Callable[[Any], UserState | None] = lambda loader: None
        self._contents: dict[str, LoaderContent] = {}

    def live_objects(self) -> list[Any]:
        return [each for source in self.sources.values() for each in source.saved_objects()]

    def feed(self, loader: Any, name: str | None = None, *, repeat: bool = False) -> Feed:
        """What a loop over this loader, or over a dict of loaders, draws from.

        A framework may say how it draws by ``PrefetchedLoader`` or ``CombinedLoaders``. A loader
        beside the loop (``repeat``) is in an epoch of its own.

        Raises:
            TypeError: a dict of loaders, which has names, and one name more.
            ConfigurationError: an empty dict, or see ``open``.
            DataPositionError: the checkpoint's position does not fit a loader.
        """
        if isinstance(loader, CombinedLoaders):
            kind = Longest if loader.after_its_end == "nothing" else Cycling
            return kind({key: self.open(each, key) for key, each in loader.loaders.items()})
        if isinstance(loader, PrefetchedLoader):
            return self.open(loader.loader, name or DEFAULT_NAME, ahead=True)
        if not isinstance(loader, Mapping):
            return self.open(loader, DEFAULT_NAME if name is None else name, repeat=repeat)
        if name is not None:
            raise TypeError("a dict of loaders has its names in its keys: leave name= out")
        if not loader:
            raise ConfigurationError("batches()", found="no loader in the dict")
        return Zipped({key: self.open(each, key, repeat=repeat) for key, each in loader.items()})

    def open(self, loader: Any, name: str, *, ahead: bool = False, repeat: bool = False) -> Source:
        """The source of this loader; the same one as before when the loop opens it again.

        Another loader may replace it at the start of an epoch.

        Args:
            loader: the loader.
            name: what the run calls it.
            ahead: whether it is asked for a batch more than is delivered.
            repeat: whether another loader replaces it in the middle of its own epoch.

        Raises:
            ConfigurationError: another loader of this name is in the middle of an epoch.
            DataPositionError: the checkpoint's position does not fit the loader, or is not that of
                a ``SkippedLoader``.
        """
        if isinstance(loader, SkippedLoader):
            source = self.open(loader.loader, name, ahead=ahead, repeat=repeat)
            loader.check(source)
            return source
        known = self.sources.get(name)
        if known is not None and known.loader is loader:
            if self._opened_in[name] < self._num_epochs:
                known.is_rebuilt = False
                self._opened_in[name] = self._num_epochs
            return known
        if known is not None and repeat and self._opened_in[name] < self._num_epochs:
            if known.batch:
                known.end_epoch()
        elif known is not None and (known.begun or self._opened_in[name] == self._num_epochs):
            position = (
                f"after batch {known.batch} of the first one" if known.begun else "in one epoch"
            )
            raise ConfigurationError(
                f"batches(name={name!r})",
                found=f"a second loader under one name, {position}",
                expected="the loader that the epoch was begun with",
                remedy="Give each loader its own name=; a new one may take over with a new epoch",
            )
        self._restore_content(loader, name, repeat=repeat)
        source = open_source(loader, name, self._seed)
        source = PrefetchingSource(source) if ahead else source
        source.allowed_changes = self._allowed_changes
        if known is not None:
            source.follow(known)
        elif name in self._pending:
            state = self._with_rebuilt(self._pending[name], source, repeat=repeat)
            source.load_state_dict(state)
            del self._pending[name]
            self.changes += source.changes
            self.unexpected += source.unexpected
        self.sources[name] = source
        self._opened_in[name] = self._num_epochs
        return source

    def open_before_epoch(self, loader: Any, name: str) -> Source:
        """The source of the loader that the last epoch used; the next one may use another."""
        source = self.open(loader, name)
        self._opened_in[name] = self._num_epochs - 1
        return source

    def _restore_content(self, loader: Any, name: str, *, repeat: bool) -> None:
        """Records what a loader that is built in the epoch is built from, or sets it."""
        self._contents.pop(name, None)
        state = self.follow_content(loader)
        if state is not None:
            self._contents[name] = content = LoaderContent(state)
            pending = self._pending.get(name, {})
            continues = pending.get("batch") and not self._is_replaced(pending, loader, repeat)
            content.begin(pending.get("content") if continues else None)

    def witness_epoch(self) -> None:
        """An epoch of ``epochs()`` begins, in a process that resumes there."""
        if any(each["rebuilt"] is None or each["batch"] for each in self._pending.values()):
            self._existing = ExistingObjects()

    def _with_rebuilt(
        self, state: dict[str, Any], source: Source, *, repeat: bool
    ) -> dict[str, Any]:
        """The state, with what can be known about whether the loader is built in every epoch."""
        existing = self._existing
        is_replaced = self._is_replaced(state, source.loader, repeat)
        if existing is None or not (is_replaced or _may_be_rebuilt(state)):
            return state
        if existing.contains(source.loader):
            return state
        recreated = existing.recreated(source.private, state["generators"])
        epoch = state["epoch"] + is_replaced
        return {**state, "epoch": epoch, "batch": 0, "rebuilt": True, "made_anew": recreated}

    def _is_replaced(self, state: Mapping[str, Any], loader: Any, repeat: bool) -> bool:
        """Whether the epoch that begins builds another loader in place of one that repeats."""
        is_within = repeat and state["batch"] > 0
        return is_within and self._existing is not None and not self._existing.contains(loader)

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        order = list(Fidelity)
        words = [self._fidelity_of(source) for source in self.sources.values()]
        words += [content.fidelity for content in self._contents.values()]
        return max(words, key=lambda word: order.index(word[0]), default=(Fidelity.EXACT, ""))

    @property
    def fed_by(self) -> str:
        """The class of a model that training changes and a replayed stream uses, if any."""
        return next((each.fed_by for each in self.sources.values() if each.fed_by), "")

    def _fidelity_of(self, source: Source) -> tuple[Fidelity, str]:
        fidelity, reason = source.fidelity
        if self._seed is None or source.keyed or fidelity is Fidelity.EXACT:
            return fidelity, reason
        return fidelity, f"{reason}; randomness='keyed' does not reach it: a stream has no indices"

    def drawn_again(self) -> list[Any]:
        """The private generators that are restored already, because the order was drawn again."""
        return [each for source in self.sources.values() for each in source.drawn_again()]

    def end_epoch(self, names: Collection[str]) -> None:
        """An epoch of ``epochs()`` ends: its loaders begin their next one, wherever they are."""
        self._num_epochs += 1
        self._existing = None
        for name in names:
            source = self.sources.get(name)
            if source is not None and source.batch:
                source.end_epoch()
            state = self._pending.get(name)
            if state is not None and state["batch"]:
                self._pending[name] = {**state, "epoch": state["epoch"] + 1, "batch": 0}

    def restore_generators(self, feed: Feed | None = None) -> None:
        """Sets the private generators of a feed, or of every loader, to the checkpoint's."""
        for source in self.sources.values() if feed is None else feed.sources:
            source.restore_generators()

    def geometry(self) -> dict[str, Any]:
        """The batch geometry of every loader that was opened, by name."""
        return {name: source.geometry for name, source in self.sources.items()}

    def before_save(self) -> None:
        for source in self.sources.values():
            source.check_position()

    def state_dict(self) -> dict[str, Any]:
        states = dict(self._pending)
        states.update({name: source.state_dict() for name, source in self.sources.items()})
        for name, content in self._contents.items():
            if states[name]["batch"]:  # else the next one is built
                states[name] = {**states[name], "content": content.state_dict()}
        return states

    def comparable_state(self) -> dict[str, Any]:
        states = {name: source.comparable_state() for name, source in self.sources.items()}
        return {name: without_history(state) for name, state in {**self._pending, **states}.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending = dict(state)
        self._in_checkpoint = frozenset(state)

    def require_known(self, names: Sequence[str]) -> None:
        """Raises DataPositionError unless a checkpoint has a position of these loaders.

        Raises:
            DataPositionError: it holds those of others only.
        """
        if self._in_checkpoint.isdisjoint(names) and self._in_checkpoint:
            raise DataPositionError(
                f"batches(name={names[0]!r})",
                found="a name that the checkpoint does not know",
                expected=f"one of {', '.join(map(repr, sorted(self._in_checkpoint)))}",
                remedy="Give the loader its former name, or restart its epochs with "
                "exclude={'data'}",
            )

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit:
        return resplit_positions(states, change)

    def usage(self, loader: Any, state: Mapping[str, Any] | None) -> EpochUsage:
        """What the position in a checkpoint means for the loader of a run's one loop.

        Changes nothing here.

        Args:
            loader: the loader.
            state: the checkpoint's position, or None where a run starts.

        Raises:
            DataPositionError: the loader does not fit the position.
            InvalidStateError: the position lacks a field.
        """
        trial = DataPosition(self._seed, allowed_changes=self._allowed_changes)
        trial.check_content(Slot.DATA.value, state or {})
        trial.load_state_dict(state or {})
        source = trial.open(loader, DEFAULT_NAME)
        is_within = source.continues
        num_used = source.batch if is_within else 0
        per_epoch = source.epoch_batches if is_within else source.num_batches
        return EpochUsage(num_used, None if per_epoch is None else per_epoch - num_used)


def open_source(loader: Any, name: str, seed: RunSeed | None = None) -> Source:
    """The source of a loader: exact seeking for map-style DataLoaders, replay for the rest.

    Args:
        loader: the user's loader.
        name: what the run calls it.
        seed: what keys are made from; None where random numbers are not keyed.
    """
    traits = LoaderTraits.of(loader)
    open_map = MapSource if seed is None else partial(KeyedSource, seed=seed)
    if traits.kind == WRAPPED:
        return WrappedSource(traits, name, open_map)
    if traits.kind == MAP:
        return open_map(traits, name)
    return StatefulSource(traits, name) if traits.kind == STATEFUL else ReplaySource(traits, name)


def saved_batch_size(state: Mapping[str, Any]) -> int | None:
    """The batch size of a run's one loader in a checkpoint's position, if it has one."""
    position = state.get(DEFAULT_NAME, {})
    found: int | None = position.get("inner", position).get("geometry", {}).get("batch_size")
    return found


def _may_be_rebuilt(state: Mapping[str, Any]) -> bool:
    """Whether a position between two epochs does not say if each epoch builds the loader."""
    return not state["batch"] and state["rebuilt"] is None
