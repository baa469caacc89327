"""The judge: does a training command resume exactly? Traces, their comparison, and the runner."""

from resumekit.prove.compare import compare
from resumekit.prove.result import LaunchSummary, Outcome, ProveResult, Trial
from resumekit.prove.runner import prove
from resumekit.prove.verdict import Divergence, Resume, Verdict

__all__ = [
    "Divergence",
    "LaunchSummary",
    "Outcome",
    "ProveResult",
    "Resume",
    "Trial",
    "Verdict",
    "compare",
    "prove",
]
