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
from resumekit.diff.table_rows import (
    COMPONENT_COLUMNS,
    TENSOR_COLUMNS,
    VALUE_COLUMNS,
    Row,
    component_rows,
    tensor_rows,
    value_rows,
)

__all__ = [
    "COMPONENT_COLUMNS",
    "TENSOR_COLUMNS",
    "VALUE_COLUMNS",
    "CheckpointDifference",
    "ComparedCheckpoint",
    "ComponentDifference",
    "ElementDifferences",
    "Row",
    "TensorDifference",
    "ValueDifference",
    "compare_checkpoints",
    "component_rows",
    "tensor_rows",
    "value_rows",
]
