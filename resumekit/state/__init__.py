"""What a run's state is made of. Nothing here knows torch, a framework or a file system."""

from __future__ import annotations

from resumekit.state.component_state import ComponentState, Stateful
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
from resumekit.state.progress import BestMetric, Progress

__all__ = [
    "BestMetric",
    "CaptureLine",
    "CaptureReport",
    "ComponentState",
    "Fidelity",
    "Progress",
    "SharingPattern",
    "Slot",
    "StateComponent",
    "Stateful",
    "Validation",
    "check_components",
]
