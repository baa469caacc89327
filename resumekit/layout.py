"""Former place of the ranks, which ``distributed`` holds."""

from __future__ import annotations

from resumekit.distributed import Groups, Layout, DataRanks, WorldChange, groups_of

__all__ = ["Groups", "Layout", "DataRanks", "WorldChange", "groups_of"]
