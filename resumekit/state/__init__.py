"""What a run's state is made of. Nothing here knows torch, a framework or a file system."""

from __future__ import annotations

from resumekit.state.capture_report import CaptureLine, CaptureReport, Fidelity, SharingPattern
from resumekit.state.component_state import (
    CLOCK_SUFFIXES,
    AfterResume,
    AfterRng,
    BeforeSave,
    ComponentState,
    InPlace,
    Renamed,
    Stateful,
)
from resumekit.state.components import Slot, StateComponent, Validation, check_components, states_of
from resumekit.state.renaming import Renaming, common_prefix_change, nearest_prefixes
from resumekit.state.world_change import WorldChange

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
