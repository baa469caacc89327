"""The judge: does a training command resume exactly? Traces, their comparison, and the runner."""

from resumekit.prove.compare import compare
from resumekit.prove.verdict import Divergence, Resume, Verdict

__all__ = ["Divergence", "Resume", "Verdict", "compare"]
