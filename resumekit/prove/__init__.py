"""The judge: does a training command resume exactly? Traces, their comparison, and the runner."""

from __future__ import annotations

from resumekit.prove import causes
from resumekit.prove.comparison import compare
from resumekit.prove.report import print_result
from resumekit.prove.result import (
    Divergence,
    LaunchSummary,
    Outcome,
    ProveResult,
    Resume,
    Trial,
    Verdict,
)
from resumekit.prove.runner import prove

__all__ = [
    "Divergence",
    "LaunchSummary",
    "Outcome",
    "ProveResult",
    "Resume",
    "Trial",
    "Verdict",
    "causes",
    "compare",
    "print_result",
    "prove",
]
