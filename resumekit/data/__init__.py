"""Where a run stands in its data, and how it gets there again."""

from resumekit.data.position import DataPosition
from resumekit.data.source import MapSource, ReplaySource, Source, announce_epoch, open_source

__all__ = [
    "DataPosition",
    "MapSource",
    "ReplaySource",
    "Source",
    "announce_epoch",
    "open_source",
]
