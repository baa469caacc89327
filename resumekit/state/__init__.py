"""What a run's state is made of. Nothing here knows torch, a framework or a file system."""

from __future__ import annotations

from resumekit.state.component import (
    CLOCK_SUFFIXES,
    AfterResume,
    AfterRng,
    BeforeSave,
    CaptureLine,
    CaptureReport,
    Checked,
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
from resumekit.state.schema import Count, Finite, Rule, Variants, check_schema

__all__ = [
    "CLOCK_SUFFIXES",
    "AfterResume",
    "AfterRng",
    "BeforeSave",
    "CaptureLine",
    "CaptureReport",
    "Checked",
    "ComponentState",
    "Count",
    "Fidelity",
    "Finite",
    "InPlace",
    "Renamed",
    "Renaming",
    "Resplit",
    "Rule",
    "SharingPattern",
    "Slot",
    "StateComponent",
    "Stateful",
    "Validation",
    "Variants",
    "WorldChange",
    "check_components",
    "check_schema",
    "common_prefix_change",
    "nearest_prefixes",
    "states_of",
]
