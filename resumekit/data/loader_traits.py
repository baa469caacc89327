"""What a loader is made of: its kind, its samplers, and the random generators it holds."""

from __future__ import annotations

import copy
import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice, repeat
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter

from resumekit.capture.rng import GENERATOR_TYPES

# Under this name a framework's loader holds the one it draws from. accelerate 1.15 data_loader.py
# DataLoaderAdapter; transformers.Trainer iterates the same class.
INNER = "base_dataloader"
# How the position in a loader is found.
MAP, WRAPPED, STATEFUL, REPLAY = "map", "wrapped", "stateful", "replay"


@dataclass(frozen=True)
class LoaderTraits:
    """What a loader is, read once, when a loop opens it.

    None of it changes while the loop draws. torch 2.13 utils/data/dataloader.py refuses another
    dataset or sampler for a DataLoader that exists, and the copy that is iterated follows no other
    setting either. What may change between two epochs is read when one begins or is saved: lengths,
    the settings of samplers and what is in their attributes, and who has ``set_epoch``.

    Args:
        loader: what the user or a framework draws from.
        inner: the same of the loader that a framework's loader draws from; None for others.
        kind: by its indices (``map``), by those of ``inner`` (``wrapped``), by its own state
            (``stateful``), or by drawing the epoch's batches again (``replay``).
        is_stream: it is known how its batches are drawn again: a DataLoader over an iterable
            dataset, or one rank draws for all. Not torch's IterDataPipe, which is rebuilt, with
            other seeds, by every loader.
        is_torchdata: it is a StatefulDataLoader that iterates as torchdata's does.
        is_node_loader: it is torchdata's over a graph of nodes, which may read ahead in threads.
        parts: what it calls: the dataset (itself where it is an iterable one), the functions that
            collate and that begin a worker, and samplers; None for one that it does not have.
        samplers: every sampler, by dotted name, outermost first.
        num_workers: the number of its worker processes.
        keeps_workers: they outlive the epoch.
        unordered: why no resume can repeat the order in which workers deliver; empty where one can.
    """

    loader: Any
    inner: LoaderTraits | None
    kind: str
    is_stream: bool
    is_torchdata: bool
    is_node_loader: bool
    parts: Mapping[str, Any]
    samplers: Mapping[str, Any]
    num_workers: int
    keeps_workers: bool
    unordered: str

    @classmethod
    def of(cls, loader: Any) -> LoaderTraits:
        """What this loader is."""
        itself = loader if isinstance(loader, IterableDataset) else None
        contained = getattr(loader, INNER, None)
        is_torchdata, is_dispatched = _is_torchdata(loader), _is_dispatched(loader)
        num_workers = getattr(loader, "num_workers", 0)
        is_unordered = num_workers and not getattr(loader, "in_order", True)
        if _is_map_style(contained) and not is_dispatched:
            kind = WRAPPED
        elif _is_map_style(loader):
            kind = MAP
        else:
            kind = STATEFUL if contained is None and _restores_itself(loader) else REPLAY
        return cls(
            loader=loader,
            inner=None if contained is None else cls.of(contained),
            kind=kind,
            is_stream=_is_stream(
                loader if contained is None else contained, is_dispatched=is_dispatched
            ),
            is_torchdata=is_torchdata,
            is_node_loader=isinstance(loader, _public("torchdata.nodes", "Loader")),
            parts={
                "dataset": getattr(loader, "dataset", itself),
                **{name: getattr(loader, name, None) for name in _CALLED},
            },
            samplers=dict(samplers_of(loader)),
            num_workers=num_workers,
            keeps_workers=bool(num_workers and getattr(loader, "persistent_workers", False)),
            unordered=_UNORDERED if is_unordered else "",
        )

    @property
    def dataset(self) -> Any:
        """The dataset; None where it has none."""
        return self.parts["dataset"]

    @property
    def collates(self) -> bool:
        """Whether it makes batches of samples."""
        return self.parts["batch_sampler"] is not None

    @property
    def is_iterable(self) -> bool:
        """Whether its dataset is an iterable one, so that its length is an estimate."""
        return isinstance(self.dataset, IterableDataset)

    @property
    def stream(self) -> LoaderTraits | None:
        """The DataLoader that it is or holds, if its batches are to be replayed."""
        return (self.inner or self) if self.is_stream else None

    def shallow_copy(self) -> DataLoader[Any]:
        """The same loader as if it had never been iterated."""
        copied: DataLoader[Any] = copy.copy(self.loader)
        copied.__dict__["_iterator"] = None
        if self.is_torchdata:
            # torchdata 0.11 stateful_dataloader.py: the state to begin with, and whether there is
            # an iterator already because its state was asked for.
            copied.__dict__.update(next_iter_state=None, _initial_iter_for_state_dict=False)
        return copied

    def shared_parts(self) -> dict[int, Any]:
        """What a copy of its samplers shares with them now, as the memo of a deep copy."""
        attributes = (getattr(each, "__dict__", {}).values() for each in self.samplers.values())
        parts = filter(_is_shared, chain.from_iterable(attributes))
        return {id(each): each for each in (self.dataset, *parts)}

    @cached_property
    def generators(self) -> dict[str, Any]:
        """Every private generator that it draws from in this process, each once, by dotted name.

        Read when it is first asked. Those of a sampler may be in an object below it, or in a module
        that its ``__iter__`` names. The dataset's own are among them only where there are no
        workers: in workers they are copies that this process cannot see.
        """
        found = private_generators(self.loader)
        of_samplers = nested_generators(self.samplers, left_out=self.shared_parts())
        found.update(with_state(of_samplers))
        for name in () if self.num_workers else ("dataset", "collate_fn"):
            found.update(private_generators(self.parts[name], f"{name}."))
        return each_once(found)

    @property
    def stateful_generators(self) -> dict[str, Any]:
        """Those of them whose state can be taken out."""
        return with_state(self.generators)


def _is_shared(value: Any) -> bool:
    return isinstance(value, (Dataset, torch.nn.Module, ModuleType))


_CALLED = ("collate_fn", "worker_init_fn", "sampler", "batch_sampler")
# Those of which workers get copies.
COPIED = ("dataset", "collate_fn", "worker_init_fn")
_UNORDERED = "in_order=False delivers in an order that no record can repeat"


def _is_torchdata(loader: Any) -> bool:
    return _iterates_as(loader, "torchdata.stateful_dataloader", "StatefulDataLoader")


def _is_dispatched(loader: Any) -> bool:
    """Whether one rank draws the batches of all, and sends each rank its batch."""
    is_dispatcher = isinstance(loader, _public("accelerate.data_loader", "DataLoaderDispatcher"))
    return is_dispatcher and loader.state.num_processes > 1


def _is_map_style(loader: Any) -> bool:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return False
    return not hasattr(loader, "state_dict") or _is_torchdata(loader)


def _is_stream(loader: Any, *, is_dispatched: bool) -> bool:
    is_torch = getattr(type(loader), "__iter__", None) is DataLoader.__iter__
    if not (is_torch or _is_torchdata(loader)):
        return False
    dataset = loader.dataset
    return is_dispatched or (
        isinstance(dataset, IterableDataset) and not isinstance(dataset, IterDataPipe)
    )


def _restores_itself(loader: Any) -> bool:
    """Whether a loader claims that its ``state_dict`` restores its position exactly."""
    if not _has_own_state(loader):
        return False
    if not _is_torchdata(loader):
        return True
    dataset = loader.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    return is_iterable and loader.num_workers == 0 and _has_own_state(dataset)


def _has_own_state(value: Any) -> bool:
    """Whether it has a state that restores it; that of a stream of ``datasets`` does not."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(value, n, None)) for n in names) and not is_hugging_face(value)


def is_hugging_face(dataset: Any) -> bool:
    """Whether it is a stream of Hugging Face ``datasets``."""
    return isinstance(dataset, _public("datasets", "IterableDataset"))


def announce_epoch(loader: Any, epoch: int, *, with_dataset: bool = True) -> None:
    """Calls ``set_epoch`` on the loader, every sampler and the dataset, where they have one."""
    holders = [loader, *(sampler for _, sampler in samplers_of(loader))]
    if with_dataset:
        holders.append(getattr(loader, "dataset", None))
    for holder in holders:
        set_epoch = getattr(holder, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def is_seeded_by_epoch(sampler: Any) -> bool:
    """Whether it is Accelerate's sampler, which draws from a generator of its own.

    accelerate 1.15 data_loader.py SeedableRandomSampler; a subclass that draws otherwise is not.
    """
    return _iterates_as(sampler, "accelerate.data_loader", "SeedableRandomSampler")


def shards_whole_batches(batch_sampler: Any) -> bool:
    """Whether it is Accelerate's, by which the ranks take turns over the batches of another one.

    accelerate 1.15 data_loader.py BatchSamplerShard; one that splits each batch, or that leaves
    some ranks with fewer batches, is not.
    """
    is_shard = _iterates_as(batch_sampler, "accelerate.data_loader", "BatchSamplerShard")
    if not is_shard or batch_sampler.split_batches:
        return False
    return bool(batch_sampler.even_batches or batch_sampler.drop_last)


def known_length(value: Any) -> int | None:
    """Its ``len()``, or None where it has none."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def initial_seed(saved: torch.Tensor, generator: torch.Generator) -> int:
    """The seed of the generator whose state was saved."""
    former = torch.Generator(generator.device)
    former.set_state(saved)
    return former.initial_seed()


def sample_iterator(iterator: Any) -> Any:
    """What gives the samples of an iterator over a torch DataLoader without workers.

    Returns:
        The dataset's iterator; the given one where it is of another kind.
    """
    # torch 2.13 utils/data/dataloader.py _SingleProcessDataLoaderIter.__init__ and
    # utils/data/_utils/fetch.py _IterableDatasetFetcher.__init__.
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    return getattr(fetcher, "dataset_iter", iterator)


def kept_iterators(loader: DataLoader[Any]) -> list[str]:
    """The attributes in which a loader keeps an iterator for all epochs.

    timm 1.0 data/loader.py MultiEpochsDataLoader makes it in ``__init__``, over its own sampler.
    """
    found = vars(loader).items()
    return [n for n, each in found if isinstance(each, _BaseDataLoaderIter) and n != "_iterator"]


def iterate_copy(copied: DataLoader[Any], kept: Iterable[str], num_used: int = 0) -> Iterator[Any]:
    """A new iterator over a copy of a loader, with new ones in place of those that it keeps.

    Args:
        copied: the copy.
        kept: from ``kept_iterators``; a loader that has such counts the batches of an epoch.
        num_used: the batches of the epoch that were used, which its samplers give no more.
    """
    for name in kept:
        copied.__dict__[name] = chain(repeat(None, num_used), DataLoader.__iter__(copied))
    iterator = iter(copied)
    if kept:
        next(islice(iterator, num_used, num_used), None)
    return iterator


def rewrap(loader: Any, inner: Any) -> Any:
    """A shallow copy of a framework's loader that draws from ``inner``."""
    # Not copy.copy: accelerate 1.15 data_loader.py DataLoaderShard.__reduce__ would first build one
    # from arguments that mean something else.
    outer = object.__new__(type(loader))
    vars(outer).update(vars(loader))
    setattr(outer, INNER, inner)
    return outer


def _public(module: str, name: str) -> Any:
    """A public class; if its module was not imported, nobody has made one of its objects: none."""
    return getattr(sys.modules.get(module), name, ())


def _iterates_as(value: Any, module: str, name: str) -> bool:
    """Whether it is of a public class, or of a subclass that iterates in the same way."""
    known = _public(module, name)
    return isinstance(value, known) and type(value).__iter__ is known.__iter__


# The attributes by which loaders and samplers of torch and DeepSpeed hold one another.
_NESTED = ("batch_sampler", "sampler", "data_sampler")
# What the names of generators begin with from which samples draw, and not their order.
DATASET_PREFIXES = ("dataset.", "collate_fn.")


def without_prefetch(state: dict[str, Any]) -> dict[str, Any]:
    """A position inside an epoch, without how far prefetching has drawn the epoch's order."""
    # The order is there once the sampler has drawn it all, what it is drawn again from before that.
    known = {key: each for key, each in state.items() if key not in ("order", "objects", "copied")}
    if not state["batch"]:
        return known
    found = state["generators"].items()
    return {**known, "generators": {n: each for n, each in found if n.startswith(DATASET_PREFIXES)}}


def samplers_of(loader: Any) -> Iterator[tuple[str, Any]]:
    """Every sampler that a loader draws from, outermost first, as ``(dotted name, object)``."""
    seen: set[int] = set()
    waiting = [("", loader)]
    while waiting:
        prefix, holder = waiting.pop(0)
        for attribute in _NESTED:
            sampler = getattr(holder, attribute, None)
            if sampler is None or id(sampler) in seen:
                continue
            seen.add(id(sampler))
            name = f"{prefix}{attribute}"
            yield name, sampler
            waiting.append((f"{name}.", sampler))


def private_generators(holder: Any, prefix: str = "") -> dict[str, Any]:
    """The generators among an object's own attributes, by dotted name."""
    attributes = getattr(holder, "__dict__", {})
    return {
        f"{prefix}{name}": value
        for name, value in attributes.items()
        if isinstance(value, GENERATOR_TYPES)
    }


def each_once(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The generators under the first of their names."""
    unique: dict[int, tuple[str, Any]] = {}
    for name, generator in generators.items():
        unique.setdefault(id(generator), (name, generator))
    return dict(unique.values())


def with_state(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the generators whose state can be taken out."""
    found = generators.items()
    return {name: each for name, each in found if not isinstance(each, random.SystemRandom)}


# A dataset may hold millions of records. What draws is near the top, and is looked at first.
_MOST_OBJECTS = 2000
_MOST_ITEMS = 50
_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), torch.Tensor, np.ndarray)
_OPAQUE = (type, ModuleType)
_CONTAINERS = (list, tuple, set, frozenset, deque)
# What a loader, or a transform inside a dataset, is called by.
_METHODS = ("__iter__", "__getitem__", "__getitems__", "__call__")


def nested_generators(
    holders: Mapping[str, Any], *, left_out: Iterable[int] = ()
) -> dict[str, Any]:
    """Every private generator that is contained somewhere below, by dotted name, each once.

    Attributes, items of containers, closures, defaults and partial arguments are followed, and what
    the code that gets a sample names in its own module, or of another module. Nothing is called.

    Args:
        holders: what to look into, by name.
        left_out: the ids of objects that are not looked into.
    """
    seen = _global_generators().union(left_out)
    found = reachable(holders, left_out=seen)
    return {name: each for name, each in found if isinstance(each, GENERATOR_TYPES)}


def reachable(
    holders: Mapping[str, Any], *, left_out: Iterable[int] = ()
) -> Iterator[tuple[str, Any]]:
    """What ``nested_generators`` looks at, by dotted name, what is nearer first."""
    waiting, seen = deque(holders.items()), set(left_out)
    while waiting and len(seen) < _MOST_OBJECTS:
        name, value = waiting.popleft()
        if id(value) in seen:
            continue
        yield name, value
        if isinstance(value, _LEAVES):
            continue
        seen.add(id(value))
        if not isinstance(value, (*GENERATOR_TYPES, *_OPAQUE)):
            waiting.extend((f"{name}.{part}", each) for part, each in _parts(value))


def _global_generators() -> set[int]:
    """The three that keys do reach, under whatever name they are contained."""
    bound: tuple[Any, ...] = (random.seed, np.random.rand)
    return {id(torch.default_generator), *(id(method.__self__) for method in bound)}


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), value[key]) for key in islice(value, _MOST_ITEMS))
    elif isinstance(value, _CONTAINERS):
        yield from (
            (str(position), item) for position, item in enumerate(islice(value, _MOST_ITEMS))
        )
    elif isinstance(value, partial):
        yield from {"func": value.func, "args": value.args, "keywords": value.keywords}.items()
    elif isinstance(value, MethodType):
        yield from {"__self__": value.__self__, "__func__": value.__func__}.items()
    elif isinstance(value, FunctionType):
        yield from _parts_of_function(value)
    else:
        yield from dict(getattr(value, "__dict__", {})).items()
        yield from _parts_of_class(type(value))


def _parts_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, GENERATOR_TYPES):
                yield name, value
    for name in _METHODS:
        function = getattr(kind, name, None)
        if isinstance(function, FunctionType):
            yield name, function


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, variables = function.__code__, function.__globals__
    yield from _named_in(variables, code.co_names)
    for name in code.co_names:
        if isinstance(variables.get(name), ModuleType):
            yield from _named_in(vars(variables[name]), code.co_names)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield "defaults", function.__defaults__
    yield "keyword_defaults", function.__kwdefaults__


def _named_in(variables: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The generators of a module that go by one of the names, and functions that are defined in it.

    Args:
        variables: of the module.
        names: those that a function uses.
    """
    for name in names:
        value = variables.get(name)
        is_function = isinstance(value, FunctionType) and value.__globals__ is variables
        if is_function or isinstance(value, GENERATOR_TYPES):
            yield name, value


# ---------------------------------------------------------------- loaders built in each epoch

# What gc.get_objects() lists; torch's generators are not among it.
_KINDS = (DataLoader, random.Random, np.random.Generator, np.random.RandomState)


class ExistingObjects:
    """The loaders and generators that exist when an epoch begins.

    A loop that builds its loader in each epoch gets new workers, and generators in the state that
    the loop gives them. Within one process the second epoch shows it. A process that resumes at the
    start of an epoch sees one loader only, and looks at what existed before: otherwise a generator
    that the loop has seeded for this epoch would get its state of the former one. Without it three
    tests of such loops fail: ``rebuilt*`` in tests/data/test_loaders.py. A walk from the script's
    variables does not do: it takes a loader that a cache holds for a new one, whose generators
    would not be restored (``loader_of_a_cache`` there).
    """

    def __init__(self) -> None:
        self._references = [_reference(each) for each in _living()]

    def contains(self, thing: Any) -> bool:
        """Whether it existed, as far as this can be known."""
        thing = getattr(thing, INNER, thing)  # what a framework wraps, it makes together with it
        if not isinstance(thing, _KINDS):
            return True
        if any(reference() is thing for reference in self._references):
            return True
        # Objects after gc.freeze() are not listed; they are older than any epoch.
        return not any(each is thing for each in _living())

    def recreated(self, generators: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
        """The names of a new loader's generators that are new as well.

        Args:
            generators: its private generators.
            saved: the states of those of the loader before it.
        """
        return [
            name
            for name, generator in generators.items()
            if name in saved and not self._is_kept(generator, saved[name])
        ]

    def _is_kept(self, generator: Any, saved: Any) -> bool:
        if not isinstance(generator, torch.Generator):
            return self.contains(generator)
        if not isinstance(saved, torch.Tensor):
            return False
        # One that lives through all epochs has been seeded once.
        return initial_seed(saved, generator) == generator.initial_seed()


def without_history(state: Mapping[str, Any]) -> dict[str, Any]:
    """A position without what is known about the loader being built in each epoch."""
    return {key: value for key, value in state.items() if key not in ("rebuilt", "made_anew")}


def _living() -> list[Any]:
    # Not isinstance: it would ask each of a million objects, and some answer for another one.
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, _KINDS)}
    return [each for each in objects if type(each) in kinds]


def _reference(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:  # NumPy's generators have no weak references
        return lambda: thing
