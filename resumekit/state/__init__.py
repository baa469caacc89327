"""What a run's state is made of. Nothing here knows torch, a framework or a file system."""

from __future__ import annotations

from resumekit.state.component import (
    CLOCK_SUFFIXES,
    AfterResume,
    AfterRng,
    BeforeSave,
    CaptureLine,
    CaptureReport,
    ComponentState,
    Fidelity,
    InPlace,
    Renamed,
    Resplit,
    SharingPattern,
    Slot,
    StateComponent,
    Stateful,
    Validation,
    WorldChange,
    check_components,
    states_of,
)
from resumekit.state.renaming import Renaming, common_prefix_change, nearest_prefixes

__all__ = [
    "CLOCK_SUFFIXES",
    "AfterResume",
    "AfterRng",
    "BeforeSave",
    "CaptureLine",
    "CaptureReport",
    "ComponentState",
    "Fidelity",
    "InPlace",
    "Renamed",
    "Renaming",
    "Resplit",
    "SharingPattern",
    "Slot",
    "StateComponent",
    "Stateful",
    "Validation",
    "WorldChange",
    "check_components",
    "common_prefix_change",
    "nearest_prefixes",
    "states_of",
]
