"""What kind of loader or dataset something is, told without importing who made it."""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

# Under this name a framework's loader holds the one it draws from. accelerate 1.15 data_loader.py
# DataLoaderAdapter; transformers.Trainer iterates the same class.
INNER = "base_dataloader"


def is_stateful_data_loader(loader: Any) -> bool:
    """Whether it is torchdata's; a subclass that iterates in its own way is not."""
    known = _public("torchdata.stateful_dataloader", "StatefulDataLoader")
    return known is not None and getattr(type(loader), "__iter__", None) is known.__iter__


def dispatches(loader: Any) -> bool:
    """Whether one rank draws the batches of all, and sends each its share."""
    known = _public("accelerate.data_loader", "DataLoaderDispatcher")
    return known is not None and isinstance(loader, known) and loader.state.num_processes > 1


def is_hugging_face(dataset: Any) -> bool:
    """Whether it is a stream of Hugging Face ``datasets``."""
    known = _public("datasets", "IterableDataset")
    return known is not None and isinstance(dataset, known)


def is_seeded_by_epoch(sampler: Any) -> bool:
    """Whether it is Accelerate's sampler, which draws from a generator of its own.

    accelerate 1.15 data_loader.py SeedableRandomSampler; a subclass that draws otherwise is not.
    """
    known = _public("accelerate.data_loader", "SeedableRandomSampler")
    return known is not None and getattr(type(sampler), "__iter__", None) is known.__iter__


def shares_whole_batches(batch_sampler: Any) -> bool:
    """Whether it is Accelerate's, by which the ranks take turns over the batches of another one.

    accelerate 1.15 data_loader.py BatchSamplerShard; one that splits each batch, or that leaves
    some ranks with fewer batches, is not.
    """
    known = _public("accelerate.data_loader", "BatchSamplerShard")
    is_known = (
        known is not None and getattr(type(batch_sampler), "__iter__", None) is known.__iter__
    )
    if not is_known or batch_sampler.split_batches:
        return False
    return bool(batch_sampler.even_batches or batch_sampler.drop_last)


def has_own_state(value: Any) -> bool:
    """Whether it offers ``state_dict`` and ``load_state_dict``."""
    names = ("state_dict", "load_state_dict")
    return all(callable(getattr(value, name, None)) for name in names)


def length_is_a_guess(loader: Any) -> bool:
    """Whether nobody can know the number of batches: those of an iterable dataset."""
    return isinstance(getattr(loader, "dataset", loader), IterableDataset)


def stream_loader(loader: Any) -> DataLoader[Any] | None:
    """The DataLoader that a loader is or holds, if its batches are to be drawn through again.

    They are where its dataset is iterable, and where one rank draws for all.

    None where it is not known how batches are drawn: a loader that iterates in its own way, and
    torch's IterDataPipe, which is built anew, with other seeds, by every loader.
    """
    inner = getattr(loader, INNER, loader)
    is_torch = getattr(type(inner), "__iter__", None) is DataLoader.__iter__
    if not (is_torch or is_stateful_data_loader(inner)):
        return None
    dataset = inner.dataset
    is_iterable = isinstance(dataset, IterableDataset) and not isinstance(dataset, IterDataPipe)
    is_stream = is_iterable or dispatches(loader)
    return inner if is_stream else None


def sample_iterator(iterator: Any) -> Any:
    """What gives the samples of an iterator over a torch DataLoader without workers.

    Returns:
        The dataset's iterator; the given one where it is of another kind.
    """
    # torch 2.13 utils/data/dataloader.py _SingleProcessDataLoaderIter.__init__ and
    # utils/data/_utils/fetch.py _IterableDatasetFetcher.__init__.
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    return getattr(fetcher, "dataset_iter", iterator)


def shallow_copy(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader as if nobody had iterated it yet."""
    copied = copy.copy(loader)
    forget_iteration(copied)
    return copied


def forget_iteration(loader: DataLoader[Any]) -> None:
    """Makes a copy of a loader begin anew, whatever the loader itself was asked before."""
    loader.__dict__["_iterator"] = None
    if is_stateful_data_loader(loader):
        # torchdata 0.11 stateful_dataloader.py: the state to begin with, and whether there is an
        # iterator already because its state was asked for.
        loader.__dict__.update(next_iter_state=None, _initial_iter_for_state_dict=False)


def around(loader: Any, inner: Any) -> Any:
    """A shallow copy of a framework's loader that draws from ``inner``."""
    # Not copy.copy: accelerate 1.15 data_loader.py DataLoaderShard.__reduce__ would first build one
    # from arguments that mean something else.
    outer = object.__new__(type(loader))
    vars(outer).update(vars(loader))
    setattr(outer, INNER, inner)
    return outer


def _public(module: str, name: str) -> Any:
    """A public class, if its module was imported: nobody has made one of its objects before."""
    return getattr(sys.modules.get(module), name, None)
