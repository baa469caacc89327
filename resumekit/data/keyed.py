"""Keyed randomness: each sample and each collation draws from a key of its own.

A key is made from the run's seed, the loader's name, the epoch and the sample's index. What a
sample draws does not depend on the worker or the rank that makes it, on what was prefetched, or on
where the run was interrupted. So workers have no state to restore, and a resumed run may have
another number of them.
"""

from __future__ import annotations

import hashlib
import operator
import random
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypedDict

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    MapDataPipe,
    RandomSampler,
    SequentialSampler,
    Subset,
    get_worker_info,
)

from resumekit.capture.global_rng import accelerator_in_use
from resumekit.data.epoch_order import DistributedResumableSampler, ResumableSampler
from resumekit.data.loader_traits import (
    DATASET_PREFIXES,
    LoaderTraits,
    known_length,
    nested_generators,
    without_prefetch,
)
from resumekit.data.map_style import BatchMark, MapSource
from resumekit.data.seeking import EPOCH_START, RecordingSampler
from resumekit.data.workers import BatchWithNote, ReplacedDataset, RestoringInit
from resumekit.errors import ConfigurationError, DriftError, UnsupportedValueError
from resumekit.state import Checked, Fidelity

# The component that holds the seed; only a checkpoint of a keyed run has it.
SEED = "data/seed"
# 128 bits for Python, 32 for NumPy, 64 for torch, whose generator for the CPU uses 32 of them.
# Words of their own: all three are Mersenne Twisters, and equal seeds would give equal numbers.
_SEEDS = struct.Struct("<16sIQ")


class Purpose(str, Enum):
    """What a key is for; two purposes never share one."""

    SAMPLE = "sample"
    BATCH = "batch"  # the samples of a dataset that gives a whole batch at once
    COLLATE = "collate"
    WORKERS = "workers"


class _SeedState(TypedDict):
    seed: int


class RunSeed(Checked):
    """The seed of all keys of a run, a component of its state: taken once, at the first start.

    Args:
        generators: private generators that the user named; a checkpoint holds their state.
    """

    schema = _SeedState

    def __init__(self, generators: Iterable[Any] = ()) -> None:
        self.value: int | None = None
        self.saved_generators = tuple(generators)

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["seed"]


def check_randomness(saved: Collection[str], randomness: str) -> None:
    """Raises DriftError unless a checkpoint was written in this mode.

    Args:
        saved: the keys of its components.
        randomness: this run's mode.

    Raises:
        DriftError: it was written in the other one, in which samples draw other numbers.
    """
    then = "keyed" if SEED in saved else "tape"
    if then != randomness:
        raise DriftError(
            "randomness",
            found=repr(randomness),
            expected=f"{then!r}, as in the checkpoint",
            remedy=f"Pass randomness={then!r}, or start a new run in an empty directory",
        )


@dataclass(frozen=True)
class Keys:
    """The keys of one loader.

    Args:
        seed: the run's.
        loader: the loader's name, so that no two draw the same numbers.
    """

    seed: int
    loader: str

    def hasher(self, purpose: Purpose, epoch: int) -> Any:
        """A hash object: ``update()`` takes the content of a key, ``digest()`` gives the key."""
        # blake2b: its definition will not change, and it is in every Python.
        subject = index_bytes((self.seed, self.loader, purpose.value, epoch))
        return hashlib.blake2b(subject, digest_size=_SEEDS.size, person=b"resumekit keys 1")

    def key(self, purpose: Purpose, epoch: int, content: bytes = b"") -> bytes:
        """One key."""
        hasher = self.hasher(purpose, epoch)
        hasher.update(content)
        return bytes(hasher.digest())

    def generator(self, purpose: Purpose, epoch: int) -> torch.Generator:
        """A new generator that a key seeded."""
        *_, seed = _SEEDS.unpack(self.key(purpose, epoch))
        return torch.Generator().manual_seed(seed)


def seed_generators(key: bytes) -> None:
    """Seeds Python's, NumPy's and torch's global generators of the CPU from a key."""
    for_python, for_numpy, for_torch = _SEEDS.unpack(key)
    random.seed(int.from_bytes(for_python, "little"))
    np.random.seed(for_numpy)
    # Not torch.manual_seed: it reseeds every device, which takes a hundred times as long.
    torch.default_generator.manual_seed(for_torch)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Puts the three global generators back, whatever was drawn or seeded inside."""
    for_python, for_numpy = random.getstate(), np.random.get_state(legacy=True)
    for_torch = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(for_python)
        np.random.set_state(for_numpy)
        torch.default_generator.set_state(for_torch)


def index_bytes(index: Any) -> bytes:
    """A sample's index as bytes: the same in every process, and no two indices alike.

    Raises:
        UnsupportedValueError: an object that is only itself, for which there is no such text.
    """
    if type(index) is int:  # the most frequent one
        return b"%d," % index
    for kind, encode in _ENCODINGS:
        if isinstance(index, kind):
            return encode(index)
    if hasattr(index, "tolist"):  # NumPy's and torch's numbers and arrays
        return index_bytes(index.tolist())
    try:
        return index_bytes(operator.index(index))
    except TypeError:
        raise UnsupportedValueError(
            "randomness='keyed'",
            found=f"a sampler that gives a {type(index).__name__} as the index of a sample",
            expected="numbers, strings, or lists, tuples and dicts of them",
        ) from None


_ENCODINGS: tuple[tuple[Any, Callable[[Any], bytes]], ...] = (
    (str, lambda text: b"s" + index_bytes(text.encode("utf-8", "surrogatepass"))),
    (bytes, lambda data: b"%d:%b" % (len(data), data)),
    ((tuple, list), lambda items: b"(%b)" % b"".join(map(index_bytes, items))),
    (Mapping, lambda mapping: b"m" + index_bytes(list(mapping.items()))),
    (slice, lambda part: b"l" + index_bytes((part.start, part.stop, part.step))),
    (float, lambda number: b"f" + index_bytes(float(number).hex())),
    (type(None), lambda _: b"n"),
)
_ONCE = (
    SequentialSampler,
    DistributedSampler,  # what it pads with goes to another rank than before
    ResumableSampler,
    DistributedResumableSampler,
)


def yields_each_index_once(loader: DataLoader[Any]) -> bool:
    """Whether an index cannot occur twice in an epoch of a rank; False for custom samplers."""
    batching: Any = loader.batch_sampler
    if type(batching) not in (BatchSampler, type(None)):
        return False
    sampler = loader.sampler if batching is None else batching.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    return type(sampler) in _ONCE


class Repeats:
    """Counts the indices of one epoch on this rank.

    Args:
        num_samples: the length of the dataset, 0 where it has none.
    """

    def __init__(self, num_samples: int) -> None:
        self._seen = bytearray(num_samples)  # a dict of all of them would outgrow the permutation
        self._times: dict[bytes, int] = {}

    def count(self, indices: Iterable[Any]) -> dict[int, int]:
        """By position, how often an index came before, for those that did."""
        counted = {position: self._count(index) for position, index in enumerate(indices)}
        return {position: times for position, times in counted.items() if times}

    def _count(self, index: Any) -> int:
        first = 0
        try:
            if not self._seen[index]:
                self._seen[index] = 1
                return 0
            first = 1
        except (TypeError, IndexError):
            pass  # an index that is no number below the length
        content = index_bytes(index)
        times = self._times.get(content, first)
        self._times[content] = times + 1
        return times


# ---------------------------------------------------------------- the samples of a loader


class KeyedSource(MapSource):
    """A map-style DataLoader whose samples draw from keys, in whatever worker they are made.

    Args:
        traits: of the user's loader, which is left as it is.
        name: what the run calls it.
        seed: the run's, known when the first epoch begins.

    Raises:
        ConfigurationError: the dataset is a pipe, which torch changes when an epoch begins.
    """

    kind = "keyed"
    keyed = True
    _sampler: KeyedSampler

    def __init__(self, traits: LoaderTraits, name: str, seed: RunSeed) -> None:
        if isinstance(traits.dataset, MapDataPipe):
            raise ConfigurationError(
                f"batches(name={name!r})",
                found="a MapDataPipe and randomness='keyed'",
                expected="a map-style Dataset",
                remedy="Pass randomness='tape'",
            )
        super().__init__(traits, name)
        self._seed = seed
        self._fetch = KeyedFetch(
            traits.dataset, traits.parts["collate_fn"], collates=traits.collates
        )
        self._copy.__dict__["dataset"] = self._fetch
        self._copy.collate_fn = _identity
        if traits.num_workers:
            self._copy.worker_init_fn = RestoringInit(self.loader.worker_init_fn, {})
        self._order_drawn_again = False
        self._finding = ""  # what a worker found

    def _new_sampler(self, *recording: Any) -> KeyedSampler:
        return KeyedSampler(self.traits, *recording)

    @property
    def fidelity(self) -> tuple[Fidelity, str]:
        if self.traits.unordered:
            return Fidelity.LOST, self.traits.unordered
        found = nested_generators(
            {"dataset": self._fetch.dataset, "collate_fn": self._fetch.collate}
        )
        if not self.traits.num_workers:
            # A checkpoint holds those of this process that are known to it.
            saved = {id(each) for each in (*self.private.values(), *self._seed.saved_generators)}
            found = {name: each for name, each in found.items() if id(each) not in saved}
        reason = self._finding or unkeyed_reason(found)
        if reason:
            return Fidelity.LOST, reason
        if self._sampler.tape is not None and not self._sampler.tape.is_empty:
            return Fidelity.EQUIVALENT, (
                "the sampler draws from a global generator as it goes, further ahead for more "
                "workers: exact for as many as before; draw the whole order when the epoch begins"
            )
        return Fidelity.EXACT, ""

    def begin(self, epoch: int) -> None:
        assert self._seed.value is not None
        keys = Keys(self._seed.value, self.name)
        self._fetch.keys, self._fetch.announced_epoch = keys, epoch
        self._sampler.begin(epoch)
        self._order_drawn_again = False
        # What the loader seeds its workers from. Persistent ones start in whatever epoch this
        # process begins with.
        self._copy.generator = keys.generator(
            Purpose.WORKERS, 0 if self.traits.keeps_workers else epoch
        )
        super().begin(epoch)

    def _take_note(self, note: str) -> None:
        self._finding = note

    def state_at(self, mark: BatchMark) -> dict[str, Any]:
        return {**super().state_at(mark), "num_workers": None, "before": None, "workers": {}}

    def comparable_state(self) -> dict[str, Any]:
        return without_prefetch(self.state_dict())

    def drawn_again(self) -> tuple[Any, ...]:
        # How far a sampler has drawn depends on what is prefetched, so that the state in the
        # checkpoint is that of other workers.
        if not self._order_drawn_again:
            return ()
        return tuple(
            generator
            for name, generator in self.private.items()
            if not name.startswith(DATASET_PREFIXES)
        )

    def _epoch_start(self, pending: Mapping[str, Any]) -> dict[str, Any]:
        start = super()._epoch_start(pending)
        is_drawn = start.get("at_first") is not None
        self._order_drawn_again = is_drawn and not pending.get("order")  # it may be a saved one
        return start

    def _num_padding(self) -> int:
        return 0

    def _attach_worker_states(self, states: Any, num_padding: int) -> None:
        """There is none."""


def _identity(batch: Any) -> Any:
    return batch


class KeyedBatch(list[Any]):
    """The indices of one batch, with all that their keys are made of.

    Args:
        given: the indices as the user's sampler gave them.
        epoch: the epoch.
        repeats: by position in the batch, how often an index came before in this epoch.
    """

    def __init__(self, given: Sequence[Any], epoch: int, repeats: Mapping[int, int]) -> None:
        super().__init__(given)
        self.given = given
        self.epoch = epoch
        self.repeats = repeats

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyedBatch, (self.given, self.epoch, self.repeats)

    def contents(self) -> list[bytes]:
        """What distinguishes each sample from all others of the epoch."""
        contents = [index_bytes(index) for index in self]
        for position, times in self.repeats.items():
            contents[position] += b"#" + index_bytes(times)
        return contents


class KeyedSampler(RecordingSampler):
    """Yields what the user's index sampler yields, as batches from which keys can be made.

    Args:
        traits: of the user's loader.
        recording: the arguments of a RecordingSampler.
    """

    def __init__(self, traits: LoaderTraits, *recording: Any) -> None:
        super().__init__(*recording)
        self._epoch = 0
        self._begun: Iterator[Any] | None = None
        self._loader, self._collates = traits.loader, traits.collates
        self._repeats: Repeats | None = None

    def begin(self, epoch: int) -> None:
        """The next iteration is that of this epoch."""
        self._epoch, self._begun = epoch, None

    def __iter__(self) -> Iterator[Any]:
        # torch 2.13 utils/data/dataloader.py _MultiProcessingDataLoaderIter asks twice when it is
        # made. A sampler that draws when it is asked would draw once more than without workers.
        if self._begun is None:
            self._begun = self._begin()
        return self._begun

    def _begin(self) -> Iterator[Any]:
        begins_again = self._seek is not EPOCH_START
        once = yields_each_index_once(self._loader)
        self._repeats = None if once else Repeats(known_length(self._loader.dataset) or 0)
        batches = super().__iter__()
        if not begins_again:
            # torch 2.13 utils/data/dataloader.py _BaseDataLoaderIter draws a seed for its workers
            # here; persistent workers draw one in a process. Here it is one in each epoch, so that
            # what follows is the same for any workers. The loader draws from one of its own.
            torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        return batches

    def _indices(self, inner: Iterator[Any], rest: Iterator[Any] | None) -> Iterator[Any]:
        for indices in super()._indices(inner, rest):
            given = indices if self._collates else [indices]
            repeats = {} if self._repeats is None else self._repeats.count(given)
            yield KeyedBatch(given, self._epoch, repeats)

    def _seek_position(self, inner: Iterator[Any]) -> Iterator[Any]:
        # What is passed over is counted as well; the batches that follow are when they are given.
        self.order.count = None if self._repeats is None else self._repeats.count
        rest = super()._seek_position(inner)
        self.order.count = None
        return rest


class KeyedFetch(ReplacedDataset):
    """Replaces the dataset in a loader: gets and collates a batch with RNGs seeded from its keys.

    Nothing is drawn that outlasts the batch: the generators of this process are restored.

    Args:
        dataset: of the user.
        collate: of the user.
        collates: whether the loader makes batches of samples.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, collates: bool) -> None:
        super().__init__(dataset)
        self.collate = collate
        self.collates = collates
        self.keys: Keys | None = None
        self.announced_epoch = 0
        self._whole_batches = _gives_whole_batches(dataset)
        self._has_looked = False

    def __getitem__(self, batch: KeyedBatch) -> Any:
        in_worker = get_worker_info() is not None
        if in_worker:
            self._announce_epoch(batch.epoch)
        with nullcontext() if in_worker else preserved_generators():
            contents = batch.contents()
            samples = self._samples(batch, contents)
            self._enter(Purpose.COLLATE, batch.epoch, b"".join(contents))
            made = self.collate(samples)
        found = self._find_unkeyed() if in_worker else ""
        return BatchWithNote(made, found) if found else made

    __getitems__ = __getitem__

    def _samples(self, batch: KeyedBatch, contents: list[bytes]) -> Any:
        if self.collates and self._whole_batches:
            self._enter(Purpose.BATCH, batch.epoch, b"".join(contents))
            return self.dataset.__getitems__(batch.given)
        assert self.keys is not None
        hasher = self.keys.hasher(Purpose.SAMPLE, batch.epoch)
        samples = []
        for index, content in zip(batch, contents, strict=True):
            key = hasher.copy()
            key.update(content)
            seed_generators(key.digest())
            samples.append(self.dataset[index])
        return samples if self.collates else samples[0]

    def _enter(self, purpose: Purpose, epoch: int, content: bytes) -> None:
        assert self.keys is not None
        seed_generators(self.keys.key(purpose, epoch, content))

    def _announce_epoch(self, epoch: int) -> None:
        """Persistent workers hold the dataset as it was when they started."""
        if epoch != self.announced_epoch:
            self.announced_epoch = epoch
            set_epoch = getattr(self.dataset, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def _find_unkeyed(self) -> str:
        """What keys do not reach and only this worker can see; asked once, after a batch."""
        if self._has_looked:
            return ""
        self._has_looked = True
        kind = accelerator_in_use(if_unknown=False)
        if kind:
            return f"random numbers on {kind} devices in workers; draw them in the training loop"
        return unkeyed_reason(
            nested_generators({"dataset": self.dataset, "collate_fn": self.collate})
        )


def _gives_whole_batches(dataset: Any) -> bool:
    while type(dataset) is Subset:  # has __getitems__ for those that do, and a loop for the rest
        dataset = dataset.dataset
    return bool(getattr(dataset, "__getitems__", None))


def unkeyed_reason(generators: Mapping[str, Any]) -> str:
    """Why these make a run inexact, and what would not; nothing where there are none."""
    if not generators:
        return ""
    return (
        f"no key reaches {', '.join(generators)}; draw from random, numpy.random or torch's "
        "default generator instead"
    )
