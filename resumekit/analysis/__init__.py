"""Static analysis of training loops: which variables a checkpoint would have to hold besides.

Standard library only; what exists at run time is asked through functions that the caller gives.
"""

from __future__ import annotations

from resumekit.analysis.loop_carried import LoopCarried, Variable, loop_carried
from resumekit.analysis.roles import Role
from resumekit.analysis.scopes import Function, LoopNode
from resumekit.analysis.source_file import (
    Located,
    Program,
    function_of,
    loop_at,
    program_of,
    stored_keys,
)

__all__ = [
    "Function",
    "Located",
    "LoopCarried",
    "LoopNode",
    "Program",
    "Role",
    "Variable",
    "function_of",
    "loop_at",
    "loop_carried",
    "program_of",
    "stored_keys",
]
