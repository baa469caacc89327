"""Where a run stands in its data, and how it gets there again."""

from __future__ import annotations

from resumekit.data.ahead import AheadSource, AskedAhead
from resumekit.data.combined import Together
from resumekit.data.generators import samplers_of, stateful_generators
from resumekit.data.keys import SEED, RunSeed, check_randomness
from resumekit.data.kinds import is_seeded_by_epoch
from resumekit.data.map_source import MapSource
from resumekit.data.position import (
    DEFAULT_NAME,
    DataPosition,
    EpochUnderWay,
    Feed,
    epoch_under_way,
    open_source,
)
from resumekit.data.replay import ReplaySource
from resumekit.data.resumable import DistributedResumableSampler, ResumableSampler
from resumekit.data.source import Source, announce_epoch
from resumekit.data.stateful import StatefulMapSource, StatefulSource
from resumekit.data.user_objects import user_objects
from resumekit.data.wrapped import WrappedSource

__all__ = [
    "DEFAULT_NAME",
    "SEED",
    "AheadSource",
    "AskedAhead",
    "DataPosition",
    "DistributedResumableSampler",
    "EpochUnderWay",
    "Feed",
    "MapSource",
    "ReplaySource",
    "ResumableSampler",
    "RunSeed",
    "Source",
    "StatefulMapSource",
    "StatefulSource",
    "Together",
    "WrappedSource",
    "announce_epoch",
    "check_randomness",
    "epoch_under_way",
    "is_seeded_by_epoch",
    "open_source",
    "samplers_of",
    "stateful_generators",
    "user_objects",
]
