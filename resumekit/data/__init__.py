"""The position of a run in its data: saved, sought, and resharded among ranks."""

from __future__ import annotations

from resumekit.data.epoch_order import DistributedResumableSampler, ResumableSampler
from resumekit.data.iterable import ReplaySource
from resumekit.data.keyed import SEED, RunSeed, check_randomness
from resumekit.data.loader_traits import (
    is_seeded_by_epoch,
    samplers_of,
    stateful_generators,
)
from resumekit.data.map_style import MapSource
from resumekit.data.position import (
    DEFAULT_NAME,
    DataPosition,
    EpochUsage,
    Feed,
    epoch_usage,
    open_source,
    saved_batch_size,
)
from resumekit.data.prefetching import PrefetchedLoader, WrappedSource
from resumekit.data.source import CombinedLoaders, Source, user_objects
from resumekit.data.stateful import StatefulSource

__all__ = [
    "DEFAULT_NAME",
    "SEED",
    "CombinedLoaders",
    "DataPosition",
    "DistributedResumableSampler",
    "EpochUsage",
    "Feed",
    "MapSource",
    "PrefetchedLoader",
    "ReplaySource",
    "ResumableSampler",
    "RunSeed",
    "Source",
    "StatefulSource",
    "WrappedSource",
    "check_randomness",
    "epoch_usage",
    "is_seeded_by_epoch",
    "open_source",
    "samplers_of",
    "saved_batch_size",
    "stateful_generators",
    "user_objects",
]
