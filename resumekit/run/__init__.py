"""How a run saves, resumes and passes its settled points; ``Checkpointer`` is its public face."""

from __future__ import annotations

from resumekit.run.framework_loop import DrivenLoop
from resumekit.run.loops import Batches, Epochs
from resumekit.run.options import (
    OptionKeywords,
    Options,
    check_components,
    checked_extras,
    checked_names,
    metric_values,
    require_order,
    run_directory,
)
from resumekit.run.report import ResumeReport
from resumekit.run.resuming import read_spread
from resumekit.run.run import Components, Run
from resumekit.run.step_boundary import LoopHost

__all__ = [
    "Batches",
    "Components",
    "DrivenLoop",
    "Epochs",
    "LoopHost",
    "OptionKeywords",
    "Options",
    "ResumeReport",
    "Run",
    "check_components",
    "checked_extras",
    "checked_names",
    "metric_values",
    "read_spread",
    "require_order",
    "run_directory",
]
