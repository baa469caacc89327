"""Runs code inside the Python processes of a command that nobody changed.

The contract is a directory, a variable and a list of activations: ``prepared_environment`` writes
a ``sitecustomize.py`` and the list into the directory, puts the directory first on ``PYTHONPATH``,
and names the list in a variable. Every Python process that the command starts then calls each
activation once its module was imported; a process that never imports it is left alone.
``processes`` starts commands, finds all their processes again, and kills them. It is imported by
its own name: the processes of such a command import this package, and need no psutil.
"""

from __future__ import annotations

from resumekit.launcher.environment import (
    VARIABLE,
    Activation,
    marker_of,
    option_against_environment,
    prepared_environment,
    refuse_launched,
)

__all__ = [
    "VARIABLE",
    "Activation",
    "marker_of",
    "option_against_environment",
    "prepared_environment",
    "refuse_launched",
]
