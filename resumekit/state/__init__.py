"""What a run's state is made of. Nothing here knows torch, a framework or a file system."""

from __future__ import annotations

from resumekit.state.component_state import CLOCK_SUFFIXES, ComponentState, Stateful
from resumekit.state.components import (
    CaptureLine,
    CaptureReport,
    Fidelity,
    SharingPattern,
    Slot,
    StateComponent,
    Validation,
    check_components,
)
from resumekit.state.renaming import Renaming, common_prefix_change, nearest_prefixes

__all__ = [
    "CLOCK_SUFFIXES",
    "CaptureLine",
    "CaptureReport",
    "ComponentState",
    "Fidelity",
    "Renaming",
    "SharingPattern",
    "Slot",
    "StateComponent",
    "Stateful",
    "Validation",
    "check_components",
    "common_prefix_change",
    "nearest_prefixes",
]
