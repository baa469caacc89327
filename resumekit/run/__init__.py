"""How a run saves, resumes and passes its safe points; ``Checkpointer`` is its public face."""

from __future__ import annotations

from resumekit.run.options import Options

__all__ = ["Options"]
