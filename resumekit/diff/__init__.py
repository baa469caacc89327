"""Compares two checkpoints of any frameworks and layouts, tensor by tensor."""

from __future__ import annotations

from resumekit.diff.checkpoints import compare_checkpoints
from resumekit.diff.result import (
    CheckpointDifference,
    ComparedCheckpoint,
    ComponentDifference,
    ElementDifferences,
    TensorDifference,
    ValueDifference,
)

__all__ = [
    "CheckpointDifference",
    "ComparedCheckpoint",
    "ComponentDifference",
    "ElementDifferences",
    "TensorDifference",
    "ValueDifference",
    "compare_checkpoints",
]
