"""How a checkpoint is saved: what triggers it, what each rank writes, and the commit."""

from __future__ import annotations

from resumekit.run.saving.background import abandon_work, drain
from resumekit.run.saving.in_flight import SaveInFlight
from resumekit.run.saving.requests import NOTHING, LeaveSignals, RequestExchange, Requests
from resumekit.run.saving.snapshot import Snapshot

__all__ = [
    "NOTHING",
    "LeaveSignals",
    "RequestExchange",
    "Requests",
    "SaveInFlight",
    "Snapshot",
    "abandon_work",
    "drain",
]
