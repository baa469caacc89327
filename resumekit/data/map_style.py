"""Map-style DataLoaders: the exact position, found again without touching the dataset."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, MapDataPipe

from resumekit.capture.rng import RngState, generator_state
from resumekit.capture.user_state.walk import content_digest
from resumekit.data.epoch_order import (
    DRAWN,
    UNKNOWN,
    Batching,
    may_draw_lazily,
    order_name,
    sampler_setting,
)
from resumekit.data.loader_changes import (
    FRAMEWORK_CHANGED,
    SHARED,
    FittedPosition,
    OrderFit,
    refuse_kind,
)
from resumekit.data.loader_traits import (
    COPIED,
    DATASET_PREFIXES,
    WRAPPED,
    LoaderTraits,
    announce_epoch,
    is_seeded_by_epoch,
    iterate_copy,
    kept_iterators,
    known_length,
    nested_generators,
)
from resumekit.data.seeking import (
    DRAWN_HERE,
    RecordingSampler,
    Seek,
    is_reshared,
    start_of,
    unpack_order,
)
from resumekit.data.source import Source, user_objects
from resumekit.data.stream_objects import MakeUserState, ObjectsAtStart
from resumekit.data.workers import (
    BatchWithNote,
    Padding,
    PaddingIndices,
    RecordingCollate,
    RestoringInit,
    padded,
)
from resumekit.errors import DataPositionError
from resumekit.state import Fidelity

# What cannot be followed for ever, or not at all.
DRAWS_LAZILY = (
    "draws from a global generator as it goes, in turns with the training step, in an epoch that "
    "is too long to keep all of its states; draw the whole order when the epoch begins, or from a "
    "generator that is an attribute of the sampler"
)


@dataclass(frozen=True)
class BatchMark:
    """The part of a position that changes with each batch; ``state_at`` makes a state of it.

    Args:
        batch: the index of the next batch in the epoch.
        samples: used in the epoch, by all ranks that share its order.
        digest: of the indices that were used; None where the order has a name.
        generators: the states of the private generators, by name.
        workers: the RNG states of the workers, by id.
        draws: what a sampler that draws as it goes drew from.
    """

    batch: int
    samples: int
    digest: str | None
    generators: dict[str, Any]
    workers: dict[int, dict[str, bytes]]
    draws: dict[str, Any]


class MapSource(Source):
    """A map-style DataLoader. The user's loader is left as it is; a shallow copy is iterated.

    The copy's index sampler is a RecordingSampler. With workers, its collate function and
    ``worker_init_fn`` carry the workers' RNG states (see ``workers``).
    """

    kind = "map"

    def __init__(self, traits: LoaderTraits, name: str) -> None:
        super().__init__(traits, name)
        loader: DataLoader[Any] = traits.loader
        self._collates = traits.collates
        self._index_sampler = "batch_sampler" if self._collates else "sampler"
        self._batching = Batching.of(loader)
        # What names the order that the loader's own sampler gives in the epoch announced last. No
        # method of ours: a cycle would keep this source alive, and with it the loader's workers.
        self._order_name = partial(order_name, self._batching.sampler, self.private)
        self._sampler = self._new_sampler(
            traits.parts[self._index_sampler], self._rng, self._order_name
        )
        self._samples = 0  # used in this epoch, by all ranks that share its order
        self._since = 0  # where the part of this rank began
        self._inherited: dict[str, Any] = {}  # names the epoch's order, if our sampler does not
        self._framework_changed = False  # the current epoch was begun under another framework
        self._former_workers: int | None = None  # their number when the checkpoint was written
        self._workers: dict[int, dict[str, bytes]] = {}
        self._checked = 0  # samples of the order that were drawn again and compared
        self._at_start: Any = None  # a copy of an unknown sampler as it was when the epoch began
        self._objects: ObjectsAtStart | None = None  # of the sampler
        self._copied: ObjectsAtStart | None = None  # of which workers have copies
        self._saved_copied: dict[str, Any] = {}  # what a resume sets these to
        self._saved_start: dict[str, Any] | None = None  # what a resume sets them to; None: nothing
        self._unknown = ""  # why the order of the epoch may not be found again
        self._kept = kept_iterators(loader)
        self._copy = traits.shallow_copy()
        # torch refuses to set these two after construction, because a live iterator would not
        # notice; the copy has none yet.
        self._copy.__dict__[self._index_sampler] = self._sampler

    def _new_sampler(self, *recording: Any) -> RecordingSampler:
        return RecordingSampler(*recording)

    def follow_objects(self, follow: MakeUserState) -> None:
        copied = {name: self.traits.parts[name] for name in COPIED}
        objects = user_objects(self, copied)
        # With keys, a resume inside the epoch may have workers.
        if self._copied is None and objects and (self.traits.num_workers or self.keyed):
            self._copied = ObjectsAtStart(follow(objects, is_kept=False))
            if self._pending is not None:  # user state is not restored yet
                self._copied.begin(self._pending.get("copied"))
                self._copied.set_back()
        if self._objects is None and may_draw_lazily(self._sampler.inner):
            samplers, shared = self.traits.samplers, self.traits.shared_parts()
            objects = user_objects(self, samplers, shared=shared.keys())
            # One with state_dict() is not among them.
            is_complete = len(objects) == len(samplers)
            self._objects = ObjectsAtStart(follow(objects)) if is_complete else None

    @cached_property
    def _in_workers(self) -> Collection[str]:
        """The generators that workers have copies of."""
        return nested_generators({name: self.traits.parts[name] for name in COPIED[:2]})

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        workers = self.traits.num_workers
        if self.traits.unordered:
            return Fidelity.LOST, self.traits.unordered
        if workers and not self._can_skip_worker:
            what = "random numbers in workers of a MapDataPipe with batch_size=None"
            return Fidelity.LOST, f"{what}; a Dataset is exact"
        if self._sampler.tape is not None and self._sampler.tape.overflowed:
            return Fidelity.LOST, f"the sampler {DRAWS_LAZILY}"
        hidden = self._in_workers if workers else ()
        if hidden:
            return (
                Fidelity.LOST,
                f"{', '.join(hidden)} is in the workers and not saved; use num_workers=0",
            )
        if self._unknown:
            return Fidelity.UNKNOWN, self._unknown
        if self._former_workers not in (None, workers):
            return Fidelity.EQUIVALENT, (
                f"num_workers was {self._former_workers} and is {workers}, so samples draw other "
                "random numbers, if they draw any; exact with randomness='keyed'"
            )
        if self._framework_changed and not workers:
            return Fidelity.EQUIVALENT, (
                "the framework that began the epoch fetches batches at other moments, so samples "
                "draw other random numbers, if they draw any; exact with randomness='keyed'"
            )
        return Fidelity.EXACT, ""

    def begin(self, epoch: int) -> None:
        announce_epoch(self.loader, epoch)
        if not self.traits.keeps_workers:
            # torchdata 0.11 stateful_dataloader.py keeps every iterator, not only that of
            # persistent workers.
            self._copy.__dict__["_iterator"] = None
        pending = self._take_pending(epoch)
        if self._order_name()["kind"] == UNKNOWN:  # no other epoch says anything about this one
            self._checked = 0
        if pending is None:
            self._begin_fresh()
        else:
            self._continue_epoch(pending)

    def _begin_fresh(self, resumed: Mapping[str, Any] | None = None) -> None:
        # torch 2.13 utils/data/dataloader.py DataLoader keeps that of persistent workers here.
        if self._copy.__dict__["_iterator"] is None:
            self._sampler.seeding = None
            self._workers = {}
            self._attach_worker_states({}, num_padding=0)
        self._samples = self._since = 0
        self._inherited, self.epoch_length = {}, None
        self._unknown = "" if self._unknown == DRAWN_HERE else self._unknown
        self._record_start()
        self._iterator = self._iterate(resumed)

    def _iterate(self, resumed: Mapping[str, Any] | None) -> Iterator[Any]:
        """A new iterator.

        Args:
            resumed: the position at which another process had workers, which are started again.
        """
        copied = self._copied
        if copied is None or self._copy.__dict__["_iterator"] is not None:
            return iterate_copy(self._copy, self._kept, self.batch)
        copied.begin(None if resumed is None else copied.state_dict())
        iterator = iterate_copy(self._copy, self._kept, self.batch)
        copied.set_back()
        self._saved_copied = copied.state_dict() if resumed is None else resumed.get("copied", {})
        return iterator

    def _record_start(self, saved: Mapping[str, Any] | None = None) -> None:
        """Records the samplers as the epoch begins, or sets them to what they were then."""
        if self._order_name()["kind"] != UNKNOWN:
            return
        # Where a loader is built in each epoch, user state may be that of a former sampler.
        if self._objects is not None and not self.is_rebuilt:
            self._objects.begin(saved)
            is_complete = self._objects.is_complete
            self._saved_start = self._objects.state_dict() if is_complete else None
        self._at_start = self._copied_sampler(self._sampler.inner)

    def _continue_epoch(self, pending: Mapping[str, Any]) -> None:
        """Builds the iterator as the interrupted run had it; the generators are set afterwards."""
        self._sampler.seeding = pending["before"]
        self._workers = {int(each): state["states"] for each, state in pending["workers"].items()}
        saved = self._saved_start = pending.get("objects")
        if saved is not None:
            self._record_start(saved)
        if self.batch:
            self._samples = pending["samples"]
            seek = Seek(
                **self._epoch_start(pending),
                seeker=self._sampler.seeker(pending, self._batching, where=self.name),
                items=unpack_order(pending["order"]) if pending.get("order") else None,
                num_padding=self._num_padding(),
                eager=self.traits.num_workers == 0,
                num_batches=self.batch,
                draws=pending["draws"],
            )
        elif self._workers and self.traits.num_workers:
            # Persistent workers outlive the epoch: the first iterator of this process draws a seed
            # that the interrupted run's drew in an earlier epoch.
            self._record_start()
            seek = Seek(at_iter=self._rng.state_dict())
        else:
            self._begin_fresh(pending if self.traits.keeps_workers else None)
            return
        self._sampler.seek(seek)
        self._attach_worker_states(self._workers, seek.num_padding)
        if pending["before"] is not None:
            self._load_rng(pending["before"])
        self._iterator = self._iterate(pending)
        self._discard_padding(seek.num_padding)
        if saved is not None and self._objects is not None:
            self._objects.set_back()
        self._attach_worker_states({}, num_padding=0)
        if "ahead" in pending:
            # What fetches ahead has seen the end of the epoch before it delivered the last batch.
            left = iter(()) if self.used_up else self._iterator
            self._iterator = refetched(pending["ahead"], left)

    def _from_other_kind(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """That of a loader which a framework had prepared, without the framework."""
        inner = state.get("inner")
        if state["kind"] != WRAPPED or inner is None or inner["kind"] != self.kind:
            refuse_kind(state, self.kind, where=self.name)
        shared = {key: state[key] for key in SHARED if key in state}
        # Private generators are those of the position itself, and move when the batch is fetched
        # again.
        ahead = [{**each, "generators": {}} for each in state["ahead"] if each is not None]
        return {**inner, **shared, "ahead": ahead, FRAMEWORK_CHANGED: True}

    def _from_counted(self, state: Mapping[str, Any]) -> dict[str, Any]:
        announce_epoch(self.loader, state["epoch"])
        name = self._order_name()
        if name["kind"] in (DRAWN, UNKNOWN):
            self._unknown = DRAWN_HERE
        batching, found = self._batching, {**self._state(), **_NO_EPOCH}
        found |= {key: state[key] for key in SHARED if key in state}
        size = state["geometry"].get("batch_size")
        if "batch_size" in state["geometry"]:
            found["geometry"]["batch_size"] = size
        used = {"since": 0, "replica": batching.replica, "num_replicas": batching.num_replicas}
        return {
            **found,
            "num_workers": self.traits.num_workers,
            "samples": state["batch"] * (size or batching.batch_size) * batching.num_replicas,
            "generators": {},  # they stay where the order is drawn from
            "order_name": name,
            "used": {**used, "in_a_row": batching.in_a_row, "digest": None},
            "sampler": sampler_setting(name),
            "before": None,
            "workers": {},
            **({"ahead": state["ahead"]} if state["ahead"] else {}),
        }

    def _epoch_start(self, pending: Mapping[str, Any]) -> dict[str, Any]:
        """What the loader's own sampler is to draw the current epoch from, see ``Seek``."""
        if is_reshared(pending):
            self._since = pending["samples"]
            self._inherited = {key: pending[key] for key in ("order_name", "start")}
        return start_of(pending)

    def _discard_padding(self, num_padding: int) -> None:
        # Each padding that is taken out lets the loader ask the sampler for one more batch: after
        # the last one it is as far ahead as it was in the interrupted run.
        assert self._iterator is not None
        for _ in range(num_padding):
            padding, indices = next(self._iterator), self._sampler.drawn.popleft()
            assert isinstance(padding, Padding)
            assert isinstance(indices, PaddingIndices)

    def _num_padding(self) -> int:
        workers = self.traits.num_workers
        # Without in_order a padding may arrive after a batch, and workers have no turns to keep.
        in_order = not self.traits.unordered
        return self.batch % workers if workers and in_order and self._can_skip_worker else 0

    @property
    def _can_skip_worker(self) -> bool:
        """Whether a worker can be passed over without asking its dataset for a sample."""
        # torch 2.13 utils/data/dataloader.py _MultiProcessingDataLoaderIter gives the workers of a
        # MapDataPipe their shards, where it sees one.
        return self._collates or not isinstance(self.traits.dataset, MapDataPipe)

    def _attach_worker_states(
        self, states: Mapping[int, Mapping[str, bytes]], num_padding: int
    ) -> None:
        """Gives the workers that start next their recorded states."""
        if self.traits.num_workers:
            self._copy.collate_fn = RecordingCollate(
                self.loader.collate_fn, num_padding, num_ahead=self.loader.prefetch_factor or 0
            )
            self._copy.worker_init_fn = RestoringInit(self.loader.worker_init_fn, states)
            dataset = self.traits.dataset
            if num_padding:
                dataset = padded(dataset, collates=self._collates)
            self._copy.__dict__["dataset"] = dataset

    def next_batch(self) -> Any:
        assert self._iterator is not None
        batch = next(self._iterator)
        self.indices = self._sampler.drawn.popleft()
        if not self._batching.has_random_access:
            self.packed = self._sampler.order.add(self.indices)
        self.num_samples = len(self.indices) if self._collates else 1
        self._samples += self.num_samples * self._batching.num_replicas
        self.batch += 1
        if isinstance(batch, BatchWithNote):
            self._take_note(batch.note)
            return batch.batch
        return batch

    def _take_note(self, note: Any) -> None:
        """Keeps what a worker reports with a batch: the states that have changed."""
        worker, states = note
        self._workers[worker] = {**self._workers.get(worker, {}), **states}

    def end_epoch(self) -> None:
        self._finish_prefetched()
        super().end_epoch()

    def _finish_prefetched(self) -> None:
        """Lets persistent workers finish their prefetched batches; their RNG continues from there.

        When an epoch is left before its end, torch drops these batches at the next one's start.
        torch 2.13 utils/data/dataloader.py _MultiProcessingDataLoaderIter._reset.
        """
        if self._iterator is None or not self.traits.keeps_workers or self.keyed:
            return
        self._sampler.stop()
        for batch in self._iterator:
            if isinstance(batch, BatchWithNote):
                self._take_note(batch.note)

    def check_position(self, mark: BatchMark | None = None) -> None:
        tape = self._sampler.tape
        mark = mark or self.mark()
        is_lost = self._unknown or (tape and tape.overflowed)
        if not self.begun or self._pending or is_lost or not mark.batch or not self._is_due(mark):
            return
        state = self.state_at(mark)
        is_saved = state["order"] is not None
        is_from_start = is_saved or "objects" in state
        if is_from_start and self._at_start is None:
            return  # it was checked, or another process began the epoch
        self._checked = mark.samples
        kind, before = type(self._sampler.followed.sampler).__name__, self._rng.state_dict()
        remedy = _LET_IT_BE_FOUND if is_saved else _LET_IT_BE_SAVED
        try:
            given = (self._at_start,) if is_from_start else (self._sampler.inner, self.epoch)
            self._draw_again(state, self._copied_sampler(*given))
        except DataPositionError:
            self._unknown = f"{kind} gives another order when it is drawn again; {remedy}"
        except Exception as error:  # noqa: BLE001 - the user's sampler, or its copy, raises anything
            self._unknown = f"{kind} is not drawn again: {error!r}; {remedy}"
        finally:
            self._rng.load_state_dict(before)
            if is_saved:
                self._at_start = None

    def _is_due(self, mark: BatchMark) -> bool:
        """Whether the order is to be compared: one with a name once, others as they are drawn."""
        if self._checked and self._sampler.order_name["kind"] != UNKNOWN:
            return False
        return mark.samples < _MANY_SAMPLES or mark.samples >= 2 * self._checked

    def _copied_sampler(self, inner: Any, epoch: int | None = None) -> Any:
        """A copy of what gives the indices, or the error that it raises.

        Args:
            inner: the live sampler, or an earlier copy.
            epoch: is announced to the copy; a sampler whose end was fetched ahead may be in the
                next one.
        """
        if not may_draw_lazily(inner) and not is_seeded_by_epoch(self._batching.sampler):
            return inner  # torch's own samplers keep nothing
        # The generators are set back afterwards: code may name them in a module.
        shared = {id(each): each for each in self.private.values()}
        try:
            copied = copy.deepcopy(inner, {**self.traits.shared_parts(), **shared})
            if epoch is not None:
                announce_epoch(copied, epoch, with_dataset=False)
        except Exception as error:  # noqa: BLE001 - the user's objects raise anything
            return error
        return copied

    def _draw_again(self, state: Mapping[str, Any], inner: Any) -> None:
        """Draws the order of the epoch up to the position, as a resume does.

        Args:
            state: the position.
            inner: from ``_copied_sampler``.

        Raises:
            DataPositionError: it is another one.
        """
        if isinstance(inner, Exception):
            raise inner
        private = self.private
        loader = self.traits.shallow_copy()
        loader.__dict__[self._index_sampler] = inner
        batching = Batching.of(loader)
        describe = partial(order_name, batching.sampler, private)
        again = RecordingSampler(inner, RngState(private), describe)
        seeker = again.seeker(state, batching, where=self.name)
        start, draws, num_batches = start_of(state), state["draws"], state["batch"]
        again.seek(Seek(**start, seeker=seeker, eager=True, num_batches=num_batches, draws=draws))
        iter(again)

    def _current_state(self) -> dict[str, Any]:
        return self.state_at(self.mark())

    def mark(self) -> BatchMark:
        sampler = self._sampler
        return BatchMark(
            batch=self.batch,
            samples=self._samples,
            digest=None if self._batching.has_random_access else sampler.order.hexdigest(),
            generators=self._generator_states(),
            workers=dict(self._workers),
            draws={} if sampler.tape is None else sampler.tape.state_dict(),
        )

    def _generator_states(self) -> dict[str, Any]:
        return {name: generator_state(each) for name, each in self.private.items()}

    def state_at(self, mark: BatchMark) -> dict[str, Any]:
        under_way = mark.batch > 0
        keep_workers = under_way or self.traits.keeps_workers
        copied = self._saved_copied if keep_workers else {}
        workers = mark.workers if keep_workers else {}
        return {
            **self._state(),
            "batch": mark.batch,
            "generators": mark.generators,
            "samples": mark.samples if under_way else 0,
            **(self._epoch_state(mark) if under_way else _NO_EPOCH),
            "sampler": sampler_setting(self._order_name()),
            "num_workers": self.traits.num_workers,
            "before": self._sampler.seeding if keep_workers else None,
            "workers": {worker: {"states": states} for worker, states in workers.items()},
            **({"copied": copied} if copied.get("slots") else {}),
        }

    def _epoch_state(self, mark: BatchMark) -> dict[str, Any]:
        """What names the order of the current epoch, and what this rank used of it."""
        sampler, batching = self._sampler, self._batching
        # What a sampler has drawn since then, for batches that were fetched ahead, it draws again.
        is_drawn = _of_order(mark.generators) == _of_order(self._generator_states())
        order = sampler.drawn_order() if is_drawn else None
        is_set = order is None and self._saved_start is not None
        return {
            **({"objects": self._saved_start} if is_set else {}),
            "order_name": sampler.order_name,
            # Nothing reads the last field: it is kept for the format.
            "start": None if batching.has_random_access else {**sampler.start, "after_iter": []},
            **self._inherited,
            "order": order,
            "draws": mark.draws if order is None else {},
            "used": {
                "since": self._since,
                "replica": batching.replica,
                "num_replicas": batching.num_replicas,
                "in_a_row": batching.in_a_row,
                "digest": mark.digest,
            },
        }

    def _fitted(self, state: Mapping[str, Any]) -> FittedPosition:
        self._former_workers = state["num_workers"]
        self._framework_changed = FRAMEWORK_CHANGED in state
        geometry, allowed = self._geometry(), self.allowed_changes
        live_name = self._order_name()
        return OrderFit(state, geometry, self.name, allowed, self._batching, live_name).fitted()

    def _geometry(self) -> dict[str, Any]:
        batch_sampler = self.loader.batch_sampler
        return {
            **super()._geometry(),
            "num_samples": known_length(self.loader.dataset),
            "batch_size": self.loader.batch_size or _number(batch_sampler, "batch_size"),
            "drop_last": self.loader.drop_last or bool(_number(batch_sampler, "drop_last")),
            "num_replicas": self._batching.num_replicas,
            "samples_per_rank": self._batching.samples_per_rank,
        }


_LET_IT_BE_SAVED = "let __iter__ return iter() of a list, which is saved"
_LET_IT_BE_FOUND = "draw it from a generator that is an attribute of the sampler"
_MAX_STATES_BYTES = 2**20
_MANY_SAMPLES = 2**16  # they are drawn again in milliseconds
_NO_EPOCH: dict[str, Any] = {"order_name": None, "start": None, "draws": {}, "used": None}


def _of_order(generators: Mapping[str, Any]) -> int | None:
    """A digest of the states of those generators from which the order may be drawn."""
    states = {n: each for n, each in generators.items() if not n.startswith(DATASET_PREFIXES)}
    return content_digest(states, limit_bytes=_MAX_STATES_BYTES)


def _number(holder: Any, name: str) -> int | None:
    """A setting of any batch sampler; None where it has no such one."""
    value = getattr(holder, name, None)
    return value if isinstance(value, int) else None


def refetched(states: Sequence[Mapping[str, Any]], batches: Iterator[Any]) -> Iterator[Any]:
    """All batches. The first ones, which a framework had prefetched, use these RNG states again."""
    rng = RngState()
    for state in states:
        current = rng.state_dict()
        rng.load_state_dict(state)
        fetched = list(islice(batches, 1))
        rng.load_state_dict(current)
        yield from fetched
    yield from batches
