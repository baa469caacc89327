"""Where a run stands in its data, and how it gets there again."""

from resumekit.data.ahead import AheadSource, AskedAhead
from resumekit.data.combined import Together
from resumekit.data.generators import stateful_generators
from resumekit.data.map_source import MapSource
from resumekit.data.position import (
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
from resumekit.data.wrapped import WrappedSource

__all__ = [
    "AheadSource",
    "AskedAhead",
    "DataPosition",
    "DistributedResumableSampler",
    "EpochUnderWay",
    "Feed",
    "MapSource",
    "ReplaySource",
    "ResumableSampler",
    "Source",
    "StatefulMapSource",
    "StatefulSource",
    "Together",
    "WrappedSource",
    "announce_epoch",
    "epoch_under_way",
    "open_source",
    "stateful_generators",
]
