"""Runs code inside the Python processes of a command that nobody changed.

The contract is a directory, a variable and a list of activations: ``prepared_environment`` writes
a ``sitecustomize.py`` and the list into the directory, puts the directory first on ``PYTHONPATH``,
and names the list in a variable. Every Python process that the command starts then calls each
activation once its module was imported; a process that never imports it is left alone.
``process_tree`` finds all processes of a command again, and kills them.
"""

from __future__ import annotations

from resumekit.launcher.environment import (
    VARIABLE,
    Activation,
    option_against_environment,
    prepared_environment,
    refuse_launched,
)
from resumekit.launcher.process_tree import is_running, kill_processes, processes_of

__all__ = [
    "VARIABLE",
    "Activation",
    "is_running",
    "kill_processes",
    "option_against_environment",
    "prepared_environment",
    "processes_of",
    "refuse_launched",
]
