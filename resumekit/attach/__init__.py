"""Attaches a ``ResumeCallback`` to the Trainers of a command that nobody changed.

``attached_environment`` prepares the environment; the adapters of the Trainer and of Lightning
have a module ``attaching`` each that acts in the processes of the command.
"""

from __future__ import annotations

from resumekit.attach.attachment import (
    EXIT_USAGE,
    Attachment,
    current_attachment,
    exit_on_usage_error,
    note_loop,
    run_directories,
    training_processes,
)
from resumekit.attach.frameworks import has_imported_trainer, lines_for_loop, note_import
from resumekit.attach.other_checkpoint import (
    asked_step,
    refuse_checkpoint,
    replace_checkpoint,
    step_names,
)
from resumekit.attach.settings import AttachSettings, attached_environment, observed_environment

__all__ = [
    "EXIT_USAGE",
    "AttachSettings",
    "Attachment",
    "asked_step",
    "attached_environment",
    "current_attachment",
    "exit_on_usage_error",
    "has_imported_trainer",
    "lines_for_loop",
    "note_import",
    "note_loop",
    "observed_environment",
    "refuse_checkpoint",
    "replace_checkpoint",
    "run_directories",
    "step_names",
    "training_processes",
]
