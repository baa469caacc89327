"""The position of a run in its data: saved, sought, and resharded among ranks."""

from __future__ import annotations

from resumekit.data.epoch_order import DistributedResumableSampler, ResumableSampler
from resumekit.data.keyed import SEED, RunSeed, check_randomness
from resumekit.data.loader_traits import LoaderTraits, is_seeded_by_epoch
from resumekit.data.position import (
    DEFAULT_NAME,
    DataPosition,
    EpochUsage,
    Feed,
    epoch_usage,
    saved_batch_size,
)
from resumekit.data.prefetching import PrefetchedLoader
from resumekit.data.source import CombinedLoaders, Source, user_objects

__all__ = [
    "DEFAULT_NAME",
    "SEED",
    "CombinedLoaders",
    "DataPosition",
    "DistributedResumableSampler",
    "EpochUsage",
    "Feed",
    "LoaderTraits",
    "PrefetchedLoader",
    "ResumableSampler",
    "RunSeed",
    "Source",
    "check_randomness",
    "epoch_usage",
    "is_seeded_by_epoch",
    "saved_batch_size",
    "user_objects",
]
