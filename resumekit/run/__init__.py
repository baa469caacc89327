"""How a run saves, resumes and passes its safe points; ``Checkpointer`` is its public face."""

from __future__ import annotations

from resumekit.run.components import weakly
from resumekit.run.loop import Loop
from resumekit.run.loops import Batches, Epochs, FrameworkLoop
from resumekit.run.options import (
    OptionKeywords,
    Options,
    check_components,
    checked_extras,
    checked_names,
    metric_values,
    require_order,
    run_directory,
    whole_number,
)
from resumekit.run.progress import Progress
from resumekit.run.report import ResumeReport
from resumekit.run.resuming.finder import read_sharded_component
from resumekit.run.run import Components, RunState
from resumekit.run.steps_taken import StepsTaken

__all__ = [
    "Batches",
    "Components",
    "Epochs",
    "FrameworkLoop",
    "Loop",
    "OptionKeywords",
    "Options",
    "Progress",
    "ResumeReport",
    "RunState",
    "StepsTaken",
    "check_components",
    "checked_extras",
    "checked_names",
    "metric_values",
    "read_sharded_component",
    "require_order",
    "run_directory",
    "weakly",
    "whole_number",
]
