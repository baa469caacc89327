"""How a checkpoint is saved: what triggers it, what each rank writes, and the commit."""

from __future__ import annotations

from resumekit.run.saving.cadence import SaveInterval, parse_cadence
from resumekit.run.saving.requests import RequestExchange, Requests
from resumekit.run.saving.saver import Saver
from resumekit.run.saving.signals import LeaveSignals

__all__ = [
    "LeaveSignals",
    "RequestExchange",
    "Requests",
    "SaveInterval",
    "Saver",
    "parse_cadence",
]
