"""How a checkpoint is saved: what each rank writes, beside the training too, and the commit."""

from __future__ import annotations

from resumekit.run.saving.background import abandon_work, drain
from resumekit.run.saving.in_flight import SaveInFlight
from resumekit.run.saving.snapshot import Snapshot

__all__ = [
    "SaveInFlight",
    "Snapshot",
    "abandon_work",
    "drain",
]
