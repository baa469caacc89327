"""The position of a run in its data: saved, sought, and resharded among ranks."""

from __future__ import annotations

from resumekit.data.epoch_order import DistributedResumableSampler, ResumableSampler

__all__ = ["DistributedResumableSampler", "ResumableSampler"]
