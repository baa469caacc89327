"""What a loop draws from: one training loader and the position in it, or several at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch.utils.data import Subset

from resumekit.capture.rng import RngState, generator_state, set_generator_state
from resumekit.capture.user_state.attributes import Holder
from resumekit.capture.user_state.exclusions import attributes_set_in
from resumekit.capture.user_state.value_types import is_user_object
from resumekit.data.loader_changes import (
    COUNTED,
    FittedPosition,
    PositionFit,
    refuse_kind,
    require_same_ranks,
)
from resumekit.data.loader_traits import (
    LoaderTraits,
    initial_seed,
    known_length,
    private_generators,
)
from resumekit.data.stream_objects import FindParameters, MakeUserState
from resumekit.errors import DataPositionError
from resumekit.state import Fidelity, Stateful


class Source(ABC):
    """A training loader and the position of its next batch.

    Attributes:
        traits: what the loader is.
        loader: the loader.
        name: what the run calls this loader.
        names: the names of the loaders in it: its own.
        epoch: the epoch of the next batch.
        batch: its index in the epoch.
        indices: the sample indices of the last batch, None where it is unknown.
        packed: the same as 64-bit integers, where they are packed already.
        num_samples: the number of samples in the last batch.
        private: the generators that this loader, and perhaps others, carry, by name.
        allowed_changes: what of the loader's geometry the user allows to change.
        fitted: the checkpoint's position as this loader takes it up, with what changed of it.
        changes: what changed in words, and generators whose seed the script has changed.
        unexpected: lines on what else of the loader the script has changed between two epochs.
    """

    kind: ClassVar[str]
    keyed: bool = False  # whether samples draw from keys, and so not from the run's state

    def __init__(self, traits: LoaderTraits, name: str) -> None:
        self.traits = traits
        self.loader = traits.loader
        self.name = name
        self.names: tuple[str, ...] = (name,)
        self.epoch = 0
        self.batch = 0
        self.indices: Any = None
        self.packed: bytes | None = None
        self.num_samples = 0
        self.allowed_changes: frozenset[str] = frozenset()
        self.fitted = FittedPosition({})
        self.changes: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self.is_rebuilt: bool | None = None  # user code makes one in each epoch; None: not known
        self._recreated: list[str] = []  # the generators that are made with it
        self._is_endless = False  # it gives more batches than its len() says
        self.epoch_length: int | None = None  # of the current epoch, where it is a special one
        self._length_in = -1  # the epoch for which the loader was asked its length last
        self._length: int | None = None
        self.private = dict(traits.generators)
        self._rng = RngState(self.private)  # all that the order may be drawn from
        self._iterator: Iterator[Any] | None = None
        self._pending: dict[str, Any] | None = None  # the position to find when the epoch begins
        self._generators: dict[str, Any] | None = None  # the generators' state at that position

    @property
    @abstractmethod
    def fidelity(self) -> tuple[Fidelity, str]:
        """How exactly the position and its RNG states are restored, and why not."""

    @property
    def fed_by(self) -> str:
        """The class of a model that training changes and that makes the batches, where known."""
        return ""

    @abstractmethod
    def begin(self, epoch: int) -> None:
        """Starts the epoch, or continues it at the checkpoint's position."""

    def _take_pending(self, epoch: int) -> dict[str, Any] | None:
        """Moves to the epoch; returns the saved position that waited for it."""
        pending, self._pending = self._pending, None
        self.epoch, self.batch = epoch, 0
        if pending is None or pending["epoch"] != epoch:
            return None
        self.batch = pending["batch"]
        return pending

    def _load_rng(self, state: Mapping[str, Any]) -> None:
        """Sets the RNG state that workers were started from, perhaps in an epoch before this one.

        A generator that the loader no longer has is left out.
        """
        generators = self._rng.generators
        kept = {n: each for n, each in state["generators"].items() if n in generators}
        self._rng.load_state_dict({**state, "generators": kept})

    def saved_objects(self) -> tuple[Any, ...]:
        """The objects that the position restores, so that nothing else may."""
        return (self.loader,)

    def follow_objects(self, follow: MakeUserState) -> None:  # noqa: B027 - most do not read them again
        """Takes what makes the user state of the objects that the loader calls."""

    def watch_models(self, trained: FindParameters) -> None:  # noqa: B027 - most replay nothing
        """Takes what gives the parameters that training changes."""

    def prime(self) -> None:  # noqa: B027 - most fetch nothing ahead
        """Fetches what is fetched ahead of the epoch's first batch."""

    @abstractmethod
    def next_batch(self) -> Any:
        """The next batch as the user's loader would give it.

        Raises:
            StopIteration: the epoch has no more.
        """

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch, with all that a resume needs."""
        return self._current_state() if self._pending is None else dict(self._pending)

    @abstractmethod
    def _current_state(self) -> dict[str, Any]:
        """``state_dict`` where no saved position waits for its epoch."""

    def check_position(self, mark: Any = None) -> None:  # noqa: B027 - most are checked at a resume
        """Called when a save begins: finds out whether a resume would find the next batch.

        It changes no generator and no sampler; ``fidelity`` reports what it has found.

        Args:
            mark: the position where it is an earlier one of this epoch.
        """

    def mark(self) -> Any:
        """The position of the next batch, for ``state_at`` during this epoch."""
        return self._current_state()

    def state_at(self, mark: Any) -> dict[str, Any]:
        """What ``state_dict`` would have given when the mark was taken."""
        return dict(mark)

    @property
    def num_batches(self) -> int | None:
        """The batches of one epoch on this rank, or None where the loader does not say."""
        unknown = self._is_endless or self.traits.is_iterable
        return None if unknown else known_length(self.loader)

    @property
    def epoch_batches(self) -> int | None:
        """The batches of the current epoch; they may differ after a change of geometry."""
        if self.epoch_length is not None:
            return self.epoch_length
        if self._is_endless or not self.begun:
            return self.num_batches
        if self._length_in != self.epoch:  # a framework's loader is slow to answer
            self._length_in, self._length = self.epoch, self.num_batches
        return self._length

    @property
    def sources(self) -> tuple[Source, ...]:
        """The loaders in it: itself."""
        return (self,)

    @property
    def begun(self) -> bool:
        """Whether an epoch has begun in this process."""
        return self._iterator is not None

    @property
    def continues(self) -> bool:
        """Whether ``begin`` continues inside an epoch that another process began."""
        return self._pending is not None and self._pending["batch"] > 0

    @property
    def used_up(self) -> bool:
        """Whether the current epoch is known to have no more batches."""
        if not (self.begun or self.continues):
            return False
        num_batches = self.epoch_batches
        return num_batches is not None and self.batch >= num_batches

    @property
    def geometry(self) -> dict[str, Any]:
        """What decides how many batches an epoch has, and how many samples are in each."""
        return self._geometry()

    def has_no_end(self) -> None:
        """The batches of this epoch are more than the loader's ``len()`` says: it says nothing."""
        if self.epoch_batches is not None and self.batch > self.epoch_batches:
            self._is_endless, self.epoch_length = True, None

    def end_epoch(self) -> None:
        """Moves the position to the start of the next epoch."""
        self.close()
        self.epoch += 1
        self.batch = 0
        self.epoch_length = None
        self._pending = None
        self._length_in = -1

    def follow(self, former: Source) -> None:
        """Takes the position of the loader that had this name before; its iterator is released.

        Raises:
            DataPositionError: that loader's position is inside an epoch that this one cannot give.
        """
        former.close()
        if former._pending is not None:
            self.load_state_dict(former._pending)
            return
        self.epoch, self.batch = former.epoch, former.batch
        kept = former.private
        self.is_rebuilt = True
        self._recreated = [n for n, each in self.private.items() if kept.get(n) is not each]

    def close(self) -> None:
        """Drops the iterator; the position stays."""
        self._iterator = None

    def restore_generators(self) -> None:
        """Sets the private generators to what they were at the checkpoint."""
        if self._generators is not None:
            in_place = {id(generator) for generator in self.drawn_again()}
            for name, state in self._generators.items():
                if id(self.private[name]) not in in_place:
                    set_generator_state(self.private[name], state)
            self._generators = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a saved position; the loader is moved there when the epoch begins.

        At the start of an epoch the loader may be another one than before.

        Raises:
            DataPositionError: nothing in this loader can be that position.
        """
        self._length_in = -1
        within = state["batch"] > 0
        if within and state["kind"] == COUNTED:
            require_same_ranks(state, where=self.name)
            state = self._from_counted(state)
        elif within and state["kind"] != self.kind:
            state = self._from_other_kind(state)
        is_of_kind = state["kind"] == self.kind
        self._is_endless = within and state["endless"]
        if is_of_kind:
            self.fitted = self._fitted(state)
            state = self.fitted.state
            self.epoch_length = None if self._is_endless else self.fitted.num_batches
            self.changes, self.unexpected = self.fitted.words, self.fitted.unexpected
        self.epoch, self.batch = state["epoch"], state["batch"]
        self.is_rebuilt, self._recreated = state["rebuilt"], state["made_anew"]
        if self.is_rebuilt and not within:
            self.unexpected = ()  # another loader in each epoch, as in a curriculum
        is_another = not within and (self.is_rebuilt or not is_of_kind)
        self._pending = None if is_another else dict(state)
        recreated = () if within else self._recreated
        saved = state["generators"].items()
        self._generators = {
            n: each for n, each in saved if n in self.private and n not in recreated
        }
        begun = self.epoch if within else self.epoch - 1
        self.changes += tuple(self._unused_seeds(self._generators, begun))

    def _unused_seeds(self, saved: Mapping[str, Any], epoch: int) -> Iterator[str]:
        """A line for each torch generator whose seed differs; its restored state is used."""
        # sentence-transformers 5 sampler.py SetEpochMixin: the seed of an epoch is seed + epoch.
        samplers = self.traits.samplers.values()
        with_epoch = [each for each in samplers if callable(getattr(each, "set_epoch", None))]
        by_epoch = {id(each) for one in with_epoch for each in private_generators(one).values()}
        for name, generator in self.private.items():
            state = saved.get(name)
            if isinstance(generator, torch.Generator) and isinstance(state, torch.Tensor):
                then, now = initial_seed(state, generator), generator.initial_seed()
                if then != now and not (id(generator) in by_epoch and then - now == epoch):
                    used = f"the script says {now}, the checkpoint's {then} is used"
                    again = "exclude={'data'} starts the data again with the script's"
                    yield f"{self.name}: seed of {name}: {used}; {again}"

    def _fitted(self, state: Mapping[str, Any]) -> FittedPosition:
        """A checkpoint's position in the geometry of this loader.

        Raises:
            DataPositionError: the geometry changed, and it is not allowed or cannot be followed.
        """
        geometry, allowed = self._geometry(), self.allowed_changes
        return PositionFit(state, geometry, self.name, allowed).at_epoch_start()

    def _from_other_kind(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A position inside an epoch that another kind of loader began, as a position of this one.

        Raises:
            DataPositionError: it cannot be found by this kind.
        """
        refuse_kind(state, self.kind, where=self.name)

    def _from_counted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """A position inside an epoch that another program has counted, as one of this kind.

        Raises:
            DataPositionError: it cannot be found by this kind.
        """
        refuse_kind(state, self.kind, where=self.name)

    def comparable_state(self) -> dict[str, Any]:
        """What two equal runs have in common: the state, without how far ahead workers are."""
        return self.state_dict()

    def drawn_again(self) -> tuple[Any, ...]:
        """The private generators that are restored already, because the order was drawn again."""
        return ()

    def _geometry(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches, "generators": sorted(self.private)}

    def _state(self) -> dict[str, Any]:
        # An epoch is over when its end was seen, not at its length: some samplers draw there.
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "batch": self.batch,
            "endless": self._is_endless,
            "rebuilt": self.is_rebuilt,
            "made_anew": self._recreated,
            "geometry": self._geometry(),
            "generators": {name: generator_state(g) for name, g in self.private.items()},
        }


def user_objects(
    source: Source, given: Mapping[str, Any] | None = None, *, shared: Collection[int] = ()
) -> dict[str, Holder]:
    """The objects of user classes in the main process that a loader calls, by name.

    An object with ``state_dict`` is saved with the position, as are random generators. What
    ``set_epoch`` sets follows from the epoch.

    Args:
        source: the training loader.
        given: some of what the loader calls, by name; None for all.
        shared: the ids of values that are left out.
    """
    found: dict[str, Holder] = {}
    for name, each in (given or source.traits.parts).items():
        value, num_subsets = each, 0
        while type(value) is Subset:
            subset = f"{source.name}.subset{num_subsets or ''}"
            found[subset] = Holder(value, only={"indices"})
            value, num_subsets = value.dataset, num_subsets + 1
        value = getattr(value, "__self__", value)
        if is_user_object(value) and not isinstance(value, Stateful):
            attributes = getattr(value, "__dict__", {}).items()
            left_out = {each for each, content in attributes if id(content) in shared}
            found[f"{source.name}.{name}"] = Holder(
                value,
                left_out=attributes_set_in(value, "set_epoch") | left_out,
                has_generators=False,
            )
    return found


# ---------------------------------------------------------------- several loaders in one loop


class Zipped:
    """Loaders whose batches come together; their epoch ends with the shortest.

    What the longer ones have left is left out, and all restart with the next epoch, as they
    would in a loop over ``zip(a, b)``. Like there, the loaders before the shortest one make a batch
    that is dropped, before the end is seen.

    Args:
        sources: the loaders by name, in the order in which they are asked.
    """

    _lasts_longest = False  # its epoch is as long as the longest one's

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)
        self.names = tuple(sources)
        self.name = ", ".join(sources)  # what errors call them
        self.sources = tuple(sources.values())

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return max(source.epoch for source in self.sources)

    @property
    def batch(self) -> int:
        """Its index in the epoch."""
        return min(source.batch for source in self.sources)

    @property
    def num_batches(self) -> int | None:
        known = [each.num_batches for each in self.sources if each.num_batches is not None]
        if len(known) < len(self._sources):
            return None
        return max(known) if self._lasts_longest else min(known)

    @property
    def indices(self) -> list[Any]:
        """The sample indices of the last batches, as far as they are known."""
        return [index for source in self.sources for index in _as_list(source.indices)]

    @property
    def packed(self) -> bytes | None:
        """The same as 64-bit integers, where all of them are packed already."""
        parts = [source.packed for source in self.sources]
        return None if None in parts else b"".join(filter(None, parts))

    @property
    def num_samples(self) -> int:
        """The number of samples in the last batches."""
        return sum(source.num_samples for source in self.sources)

    @property
    def begun(self) -> bool:
        return all(source.begun for source in self.sources)

    @property
    def continues(self) -> bool:
        return any(source.continues for source in self.sources)

    @property
    def used_up(self) -> bool:
        return any(source.used_up for source in self.sources)

    def begin(self, epoch: int) -> None:
        """Starts the epoch, or continues it at the checkpoint's position.

        Raises:
            DataPositionError: the checkpoint holds a position in some of the loaders only.
        """
        continued = {name: source.continues for name, source in self._sources.items()}
        if len(set(continued.values())) > 1:
            raise DataPositionError(
                self.name,
                found="no position in "
                + ", ".join(n for n, known in continued.items() if not known),
                expected="a position in each of the loaders",
                remedy="Zip the loaders of the interrupted run; others may join at the next epoch",
            )
        for source in self.sources:
            source.begin(epoch)

    def prime(self) -> None:
        """Does nothing: no batch is fetched ahead of the epoch's first one."""

    def next_batch(self) -> dict[str, Any]:
        return {name: source.next_batch() for name, source in self._sources.items()}

    def has_no_end(self) -> None:
        for source in self.sources:
            source.has_no_end()

    def end_epoch(self) -> None:
        for source in self.sources:
            source.end_epoch()

    def close(self) -> None:
        for source in self.sources:
            source.close()


def _as_list(indices: Any) -> list[Any]:
    if indices is None:
        return []
    return list(indices) if isinstance(indices, (list, tuple)) else [indices]


@dataclass(frozen=True)
class CombinedLoaders:
    """Loaders of which each step takes a batch, as long as the longest has one.

    Args:
        loaders: by name, in the order in which they are asked.
        after_its_end: what a shorter one gives when it is used up: no more, and so None, or its
            batches once more, in another order.
    """

    loaders: Mapping[str, Any]
    after_its_end: Literal["nothing", "again"]


class Longest(Zipped):
    """Of a loader that is used up the epoch's other steps get None.

    Its position is then the start of the next epoch.
    """

    _lasts_longest = True

    @property
    def epoch(self) -> int:
        return min(source.epoch for source in self.sources)

    @property
    def batch(self) -> int:
        return max(source.batch for source in self._under_way())

    @property
    def begun(self) -> bool:
        return any(source.begun for source in self.sources)

    @property
    def used_up(self) -> bool:
        return all(source.used_up for source in self._under_way())

    def begin(self, epoch: int) -> None:
        is_continued = self.continues
        for source in self.sources:
            if source.continues or not is_continued:
                source.begin(epoch)

    def next_batch(self) -> dict[str, Any]:
        batches: dict[str, Any] = dict.fromkeys(self.names)
        over: list[Source] = []
        under_way = {name: source for name, source in self._sources.items() if source.begun}
        for name, source in under_way.items():
            try:
                batches[name] = source.next_batch()
            except StopIteration:
                over.append(source)
        if len(over) == len(under_way):
            raise StopIteration
        for source in over:
            source.end_epoch()
            source.indices, source.packed, source.num_samples = None, None, 0
        return batches

    def end_epoch(self) -> None:
        epoch = self.epoch
        for source in self.sources:
            if source.epoch == epoch:
                source.end_epoch()

    def _under_way(self) -> list[Source]:
        epoch = self.epoch
        return [source for source in self.sources if source.epoch == epoch]


class Cycling(Zipped):
    """A loader that is used up begins again, within the epoch, until all were used up once.

    All draw another order with the next epoch, wherever they are. A loader that has given fewer
    batches than there were steps has begun again.
    """

    _lasts_longest = True

    @property
    def batch(self) -> int:
        return max(source.batch for source in self.sources)

    @property
    def used_up(self) -> bool:
        steps = self.batch
        return all(source.used_up or source.batch < steps for source in self.sources)

    def next_batch(self) -> dict[str, Any]:
        steps = self.batch
        were_used_up = {name for name, each in self._sources.items() if each.batch < steps}
        batches = {}
        for name, source in self._sources.items():
            try:
                batches[name] = source.next_batch()
            except StopIteration:
                were_used_up.add(name)
                if len(were_used_up) == len(self._sources):
                    raise
                batches[name] = self._restart(source)
        return batches

    def _restart(self, source: Source) -> Any:
        epoch = source.epoch
        source.end_epoch()
        source.begin(epoch)
        return source.next_batch()
