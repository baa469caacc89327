"""The random state of a run: taken at the safe point, restored last of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from resumekit.capture.rng import RngState, RngStates, generator_state, set_generator_state
from resumekit.data.position import DataPosition, Feed
from resumekit.data.source import Source
from resumekit.state import Adopting, Checked, Fidelity, Resplit, WorldChange

_AT_EPOCH = "at_epoch"


class RandomState(Checked, Adopting):
    """The component ``rng``: what a checkpoint holds is set when the loop reaches its position.

    Until then it is kept, and a save in between saves it again. The random state that an epoch of
    ``epochs()`` began with is a part of it: a resume inside the epoch runs the code again that
    stands before the first batch, and what that code draws has to be the same.

    Args:
        generators: private generators that the user named.
        position: the loaders, which have generators of their own.
    """

    schema = RngStates

    def __init__(self, generators: Mapping[str, Any], position: DataPosition) -> None:
        self._rng = RngState(generators)
        self._position = position
        self._pending: dict[str, Any] | None = None
        self._is_restored = False
        self._at_epoch: dict[str, Any] | None = None  # of an epoch of epochs()

    @property
    def generators(self) -> Mapping[str, Any]:
        """The private generators that the user named."""
        return self._rng.generators

    @property
    def fidelity(self) -> tuple[Fidelity, str] | None:
        """As of ``RngState``: lost where the generators of an accelerator cannot be read."""
        return self._rng.fidelity

    def state_dict(self) -> dict[str, Any]:
        """The state of every generator but the loaders' own."""
        if self._pending is not None:
            return self._pending
        at_epoch = {} if self._at_epoch is None else {_AT_EPOCH: self._at_epoch}
        return {**self._rng.state_dict(), **at_epoch}

    def adopted(self, given: Any) -> dict[str, Any]:
        """The state; what was not saved, such as private generators, has its live state."""
        return {**given, "generators": self._rng.state_dict()["generators"]}

    def check_state_dict(self, state: Any) -> None:
        """Raises StateMismatchError unless ``state`` can be loaded; changes nothing.

        Raises:
            StateMismatchError: it is that of other generators.
        """
        self._rng.check_state_dict(state)
        if _AT_EPOCH in state:
            self._rng.check_state_dict(state[_AT_EPOCH])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps the state until ``restore``."""
        self._pending = state
        self._at_epoch = state.get(_AT_EPOCH)

    def begin_epoch(self, *, continues: bool) -> None:
        """``epochs()`` is about to give an epoch.

        Args:
            continues: another process began it: its first lines see the random state of then.
        """
        if not continues:
            self._at_epoch = self._rng.state_dict()
        elif self._at_epoch is not None:
            self._rng.load_state_dict(self._at_epoch)

    def restore(self) -> tuple[str, ...]:
        """Sets the random state, the last act of a resume; a no-op when there is none to set.

        Returns:
            What is not restored exactly.
        """
        self._is_restored = True
        self._position.restore_generators()
        pending, self._pending = self._pending, None
        if pending is None:
            return ()
        # The user may have named a loader's own as well.
        in_place = [(each, generator_state(each)) for each in self._position.drawn_again()]
        messages = self._rng.load_state_dict(pending)
        for generator, state in in_place:
            set_generator_state(generator, state)
        return messages

    def resplit_state_dict(self, states: Mapping[int, Any], change: WorldChange) -> Resplit:
        """This rank's state in a job of another number of ranks; a new one gets one of its own."""
        if change.is_new:  # its epoch began elsewhere
            states = {rank: _without_epoch(state) for rank, state in states.items()}
        return self._rng.resplit_state_dict(states, change)

    def begin(self, feed: Feed, epoch: int, restore: Callable[[], None]) -> None:
        """Begins or continues an epoch of a loader, at the right random state.

        Args:
            feed: the loader, or several.
            epoch: the epoch.
            restore: calls this object's ``restore``.
        """
        if feed.continues:
            self._catch_up(feed)
            # Its iterator was there already at the checkpoint, and to build it again may draw.
            with self._kept(feed):
                feed.begin(epoch)
            restore()
        else:
            restore()
            self._catch_up(feed)
            feed.begin(epoch)

    def _catch_up(self, feed: Feed) -> None:
        """Sets what this feed alone draws from, if it was opened after all else was restored."""
        if self._is_restored:
            shared = {**self._of_others(feed), **_by_identity(self._rng.generators.values())}
            states = {key: generator_state(generator) for key, generator in shared.items()}
            self._position.restore_generators(feed)
            for key, generator in shared.items():
                set_generator_state(generator, states[key])

    @contextmanager
    def _kept(self, feed: Feed) -> Iterator[None]:
        """Whatever is drawn inside, every generator is afterwards where it was.

        Those excepted that no other loader has, and that drawing again brought to their position.
        """
        others = self._of_others(feed)
        kept = {**others, **_by_identity(_private([*feed.sources]))}
        states = {key: generator_state(generator) for key, generator in kept.items()}
        common = self._rng.state_dict()
        yield
        for source in feed.sources:
            drawn = _by_identity(source.drawn_again())
            states.update(
                {key: generator_state(drawn[key]) for key in drawn.keys() - others.keys()}
            )
        self._rng.load_state_dict(common)
        for key, generator in kept.items():
            set_generator_state(generator, states[key])

    def _of_others(self, feed: Feed) -> dict[int, Any]:
        """The private generators of the loaders that are not in this feed."""
        others = [each for each in self._position.sources.values() if each not in feed.sources]
        return _by_identity(_private(others))


def _without_epoch(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in state.items() if name != _AT_EPOCH}


def _private(sources: Iterable[Source]) -> Iterator[Any]:
    for source in sources:
        yield from source.private.values()


def _by_identity(generators: Iterable[Any]) -> dict[int, Any]:
    return {id(generator): generator for generator in generators}
