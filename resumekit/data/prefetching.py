"""Sources that take batches from an inner source before they deliver them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

from resumekit.capture.rng import RngState
from resumekit.data.iterable import ReplaySource, digest_of, warn_of_data
from resumekit.data.loader_changes import (
    FRAMEWORK_CHANGED,
    RANKS,
    SHARED,
    FittedPosition,
    PositionFit,
    refuse_kind,
)
from resumekit.data.loader_traits import (
    COPIED,
    WRAPPED,
    LoaderTraits,
    announce_epoch,
    rewrap,
    without_prefetch,
)
from resumekit.data.map_style import MapSource
from resumekit.data.source import Source, user_objects
from resumekit.data.stream_objects import FindParameters, MakeUserState, ObjectsReadAhead
from resumekit.errors import DataPositionError
from resumekit.state import Fidelity

_CHANGED_AHEAD = (
    "is changed after a batch is fetched ahead of its step; change it between two epochs, or name "
    "it in transient= if no sample depends on it"
)
_OTHER_AHEAD = (
    "a batch that was fetched ahead of its step is another one now: the samples change what they "
    "are made from; use workers, or make them from their index and random numbers"
)


@dataclass(frozen=True)
class _Fetched:
    """A batch that was fetched and not delivered yet, and where it came from.

    Args:
        position: of the inner source before the fetch, its mark.
        random: the RNG state before the fetch; None where samples draw from keys.
        indices: the batch's sample indices.
        num_samples: their number.
        batch: what was fetched.
        before: the marks of the objects that it was fetched from, before the fetch.
        after: the same after it.
    """

    position: Any
    random: dict[str, Any] | None
    indices: Any
    num_samples: int
    batch: Any
    before: dict[str, Any]
    after: dict[str, Any]


class _Ahead(NamedTuple):
    """Such a batch in a saved position.

    Args:
        random: as of ``_Fetched``.
        values: what its objects held before the fetch, where that was something else at the save.
        content: its digest, where a fetch may have changed more than that; else empty.
    """

    random: dict[str, Any] | None
    values: dict[str, Any]
    content: str


class OuterSource(Source):
    """Its position is that of the inner source before the first batch that was not delivered.

    What was taken and not delivered stands in its state under ``ahead``, see ``_Ahead``: a resume
    fetches it once more, when user state is restored.

    Args:
        traits: of what the user gave.
        name: what the run calls it.
        inner: the source that it draws from.
    """

    def __init__(self, traits: LoaderTraits, name: str, inner: Source) -> None:
        super().__init__(traits, name)
        self._inner = inner
        self.keyed = inner.keyed
        self._ahead: deque[_Fetched] = deque()
        self._to_fetch: deque[_Ahead] = deque()  # once more
        self._resumed: dict[str, Any] = {}  # the position of the inner source before them
        self._differs = False  # fetched once more, it was another batch
        self._objects: ObjectsReadAhead | None = None
        self._is_first = True  # no batch of the epoch was fetched

    def follow_objects(self, follow: MakeUserState) -> None:
        inner = self._inner
        inner.follow_objects(follow)
        # Workers have copies, and a stream replays what it changes itself.
        is_elsewhere = inner.traits.num_workers or isinstance(inner, ReplaySource)
        if self._objects is None and not is_elsewhere:
            objects = user_objects(inner, {name: inner.traits.parts[name] for name in COPIED})
            self._objects = ObjectsReadAhead(follow(objects, is_kept=False)) if objects else None

    def watch_models(self, trained: FindParameters) -> None:
        self._inner.watch_models(trained)

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        objects = self._objects if self._ahead else None
        changed = objects.changed_since(self._ahead[0].after) if objects else []
        if changed or self._differs:
            return Fidelity.LOST, f"{changed[0]} {_CHANGED_AHEAD}" if changed else _OTHER_AHEAD
        return self._inner.fidelity

    @property
    def fed_by(self) -> str:
        return self._inner.fed_by

    @property
    def geometry(self) -> dict[str, Any]:
        return {**self._inner.geometry, "outer": self._geometry()}

    def end_epoch(self) -> None:
        self._inner.end_epoch()  # before its iterator is closed: it sees how far the epoch came
        super().end_epoch()
        self._start_fetching(None)

    def _start_fetching(self, pending: Mapping[str, Any] | None) -> None:
        """Nothing is fetched; what is ahead in a saved position is fetched again next."""
        self._ahead.clear()
        self._is_first = True
        saved: Mapping[str, Any] = {"ahead": (), "inner": {}} if pending is None else pending
        self._resumed = saved["inner"]
        values = saved.get("ahead_values", repeat({}))
        contents = saved.get("ahead_contents", repeat(""))
        self._to_fetch = deque(map(_Ahead, saved["ahead"], values, contents))

    def check_position(self, mark: Any = None) -> None:
        self._inner.check_position(self._ahead[0].position if self._ahead else None)

    def _fetch(self) -> Any:
        """Takes the next batch from the inner source; it counts when it is delivered."""
        objects = self._objects
        if objects is not None and self._is_first:
            objects.begin()
        self._is_first = False
        if self._to_fetch and self._inner.used_up:
            self._to_fetch.clear()  # batches are larger now, and fewer
        if not self._to_fetch:
            return self._fetch_now()
        again = self._to_fetch.popleft()
        current = self._rng.state_dict()
        replaced = {} if objects is None else objects.set_values(again.values)
        if again.random is not None:
            self._rng.load_state_dict(again.random)
        batch = self._fetch_now()
        if again.random is not None:
            self._rng.load_state_dict(current)
        if objects is not None:
            objects.set_values(replaced)
        if again.content and again.content != digest_of(batch):
            self._differs = True
            warn_of_data(f"the position in {self.name!r} is lost: {_OTHER_AHEAD}")
        return batch

    def _fetch_now(self) -> Any:
        inner, objects = self._inner, self._objects
        position, random = inner.mark(), None if inner.keyed else self._rng.state_dict()
        before = objects.marks() if objects else {}
        batch = inner.next_batch()
        of_batch = (inner.indices, inner.num_samples, batch)
        after = objects.marks() if objects else {}
        self._ahead.append(_Fetched(position, random, *of_batch, before, after))
        return batch

    def _count_delivered(self) -> None:
        delivered = self._ahead.popleft()
        self.indices, self.num_samples = delivered.indices, delivered.num_samples
        self.batch += 1

    def _current_state(self) -> dict[str, Any]:
        inner, ahead = self._inner, [*map(self._as_saved, self._ahead), *self._to_fetch]
        values, contents = [each.values for each in ahead], [each.content for each in ahead]
        if self._ahead:
            position = inner.state_at(self._ahead[0].position)
        else:  # the generators stand behind what is to be fetched
            position = self._resumed if self._to_fetch else inner.state_dict()
        return {
            **self._state(),
            "inner": position,
            "ahead": [each.random for each in ahead],
            **({"ahead_values": values} if any(values) else {}),
            **({"ahead_contents": contents} if any(contents) else {}),
        }

    def _as_saved(self, fetched: _Fetched) -> _Ahead:
        objects = self._objects
        values = objects.plain_values(fetched.before) if objects else {}
        has_changed = objects is not None and objects.have_changed()
        return _Ahead(fetched.random, values, digest_of(fetched.batch) if has_changed else "")

    def drawn_again(self) -> tuple[Any, ...]:
        return self._inner.drawn_again()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._pending is None:
            self._inner.end_epoch()  # another loader begins an epoch

    def _fitted(self, state: Mapping[str, Any]) -> FittedPosition:
        inner = self._inner
        inner.allowed_changes = self.allowed_changes
        inner.load_state_dict({**state["inner"], **{k: state[k] for k in (RANKS,) if k in state}})
        batch = inner.batch if state["batch"] else 0
        whole = {**state, "inner": inner.state_dict(), "batch": batch}
        allowed = frozenset(inner.fitted.changes)
        moved = PositionFit(whole, self._geometry(), self.name, allowed).around(inner.fitted)
        return FittedPosition(
            moved,
            inner.fitted.changes,
            inner.changes,
            inner.unexpected,
            num_batches=inner.epoch_length,
        )

    def _from_counted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {
            **{key: state[key] for key in SHARED if key in state},
            "kind": self.kind,
            "geometry": dict(self._geometry()),
            "generators": {},
            "inner": {**state, "ahead": []},
            "ahead": list(state["ahead"]),
        }

    def comparable_state(self) -> dict[str, Any]:
        state = self.state_dict()
        if not self._inner.keyed:
            return state
        return {**without_prefetch(state), "inner": without_prefetch(state["inner"])}


@dataclass(frozen=True)
class PrefetchedLoader:
    """How some frameworks draw from a loader without a length: see ``PrefetchingSource``.

    Args:
        loader: the user's loader.
    """

    loader: Any


class PrefetchingSource(OuterSource):
    """Fetches the next batch before it delivers one, and so knows which is the last of an epoch.

    The position is that of the batch that was fetched and not delivered. A resume fetches it once
    more, from the RNG state that it was fetched from.

    Args:
        inner: the source that it draws from.
    """

    kind = "ahead"

    def __init__(self, inner: Source) -> None:
        super().__init__(inner.traits, inner.name, inner)
        self.private = dict(inner.private)
        self._rng = RngState(self.private)
        self._is_ahead = False  # of the current epoch a batch was asked for
        self._next: Any = None  # the batch that is ahead, while there is one

    @property
    def num_batches(self) -> int | None:
        return None

    @property
    def used_up(self) -> bool:
        if self._pending is not None:
            return self.continues and not self._pending["ahead"]
        return self.begun and self._is_ahead and not (self._ahead or self._to_fetch)

    def begin(self, epoch: int) -> None:
        pending = self._take_pending(epoch)
        self._inner.begin(epoch)
        self._iterator = iter(())
        self._is_ahead = self.batch > 0
        self._start_fetching(pending if self._is_ahead else None)
        if self._to_fetch and isinstance(self._inner, ReplaySource):
            self._fetch_next()  # before user state, which has what its fetch changes

    def prime(self) -> None:
        if self._to_fetch or not self._is_ahead:
            self._is_ahead = True
            self._fetch_next()

    def next_batch(self) -> Any:
        self.prime()
        if not self._ahead:
            raise StopIteration
        batch = self._next
        self._count_delivered()
        self._fetch_next()
        return batch

    def _fetch_next(self) -> None:
        self._next = None
        with suppress(StopIteration):
            self._next = self._fetch()

    def end_epoch(self) -> None:
        super().end_epoch()
        self._is_ahead, self._next = False, None

    def close(self) -> None:
        super().close()
        self._inner.close()

    def _fitted(self, state: Mapping[str, Any]) -> FittedPosition:
        return replace(super()._fitted(state), num_batches=None)  # it is asked until it has no more


class WrappedSource(OuterSource):
    """A loader that draws from a map-style DataLoader and may be some batches ahead of the loop.

    What counts is the position of the inner loader before the first batch that was not delivered. A
    resume fetches the batches ahead once more, each from the RNG state that it was fetched from
    before, and hands them to the outer loader. The user's loader is left as it is; a shallow copy
    is iterated, around an inner loader of our own.

    Args:
        traits: of the framework's loader.
        name: what the run calls it.
        open_inner: gives the source of the loader inside.
    """

    kind = WRAPPED

    def __init__(
        self, traits: LoaderTraits, name: str, open_inner: Callable[[Any, str], MapSource]
    ) -> None:
        assert traits.inner is not None
        super().__init__(traits, name, open_inner(traits.inner, name))
        self._outer = rewrap(traits.loader, _Feed(self, traits.inner.loader))
        self._continues = False  # the current epoch was begun by another process
        self._current_rng: dict[str, Any] = {}  # the RNG state that it continues from

    def begin(self, epoch: int) -> None:
        announce_epoch(self._outer, epoch)
        pending = self._take_pending(epoch)
        self._start_fetching(None)
        self._continues = False
        if pending is not None and self.batch:
            self._continue_epoch(pending)
        else:
            self.epoch_length = None
        self._iterator = iter(()) if self._is_at_end(pending) else iter(self._outer)

    def _is_at_end(self, pending: Mapping[str, Any] | None) -> bool:
        """Whether nothing is left, and the inner loader has come to its end."""
        if self.epoch_batches is None or not 0 < self.epoch_batches <= self.batch:
            return False
        # An outer loader that has delivered everything has seen the end of the inner one.
        return pending is None or FRAMEWORK_CHANGED not in pending["inner"]

    def _continue_epoch(self, pending: Mapping[str, Any]) -> None:
        """The prefetched batches are fetched once more; the generators are set before that."""
        self._continues = True
        if self._is_at_end(pending):
            return
        self._inner.begin(self.epoch)
        self._start_fetching(pending)

    def next_batch(self) -> Any:
        assert self._iterator is not None
        if self._continues:
            self._current_rng = self._rng.state_dict()
        batch = next(self._iterator)
        if not self._ahead:
            raise DataPositionError(
                self.name,
                found=f"a batch of {type(self.loader).__name__} that this rank did not draw",
                expected="one batch from its inner loader for each that it hands out",
            )
        self._count_delivered()
        return batch

    def begin_inner(self) -> None:
        """The outer loader makes its iterator, at its own first batch."""
        if self._continues:
            # What it drew or synchronised just now, it did in the interrupted run as well.
            self._rng.load_state_dict(self._current_rng)
            self._continues = False
        else:
            self._inner.begin(self.epoch)

    def take(self) -> Any:
        """The next batch for the outer loader."""
        return self._fetch()

    def _from_other_kind(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """That of the plain loader, inside the framework's."""
        if state["kind"] != self._inner.kind:
            refuse_kind(state, WRAPPED, where=self.name)
        inner = {id(generator): name for name, generator in self._inner.private.items()}
        names = {inner[id(each)]: name for name, each in self.private.items() if id(each) in inner}
        saved = state["generators"].items()
        return {
            **{key: state[key] for key in SHARED if key in state},
            "kind": WRAPPED,
            "geometry": dict(self._geometry()),
            "generators": {names[name]: each for name, each in saved if name in names},
            "inner": {**state, FRAMEWORK_CHANGED: True},
            "ahead": [],
        }


class _Feed:
    """What the outer loader takes for its inner one: the same, but every batch comes from us.

    It does not keep the source alive: workers of a loader that goes in a cycle of references are
    waited for, 5 seconds each. torch 2.13 utils/data/dataloader.py ``_shutdown_workers``.
    """

    def __init__(self, source: WrappedSource, loader: Any) -> None:
        self._source = weakref.proxy(source)
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._source.begin_inner()
        return self

    def __next__(self) -> Any:
        return self._source.take()
