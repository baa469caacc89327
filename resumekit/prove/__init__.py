"""The judge: does a training command resume exactly? Traces, their comparison, and the runner."""

from __future__ import annotations

from resumekit.prove import causes, recordings
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
from resumekit.prove.trace_records import (
    CHECKPOINT,
    END,
    RESUMED,
    STEP,
    Attempt,
    Record,
    TraceTail,
    launch_directory,
    read_trace,
    records_of,
    steps_of,
)

__all__ = [
    "CHECKPOINT",
    "END",
    "RESUMED",
    "STEP",
    "Attempt",
    "Divergence",
    "LaunchSummary",
    "Outcome",
    "ProveResult",
    "Record",
    "Resume",
    "TraceTail",
    "Trial",
    "Verdict",
    "causes",
    "compare",
    "launch_directory",
    "print_result",
    "prove",
    "read_trace",
    "recordings",
    "records_of",
    "steps_of",
]
