"""Runs code inside the Python processes of a command that nobody changed.

The contract is a directory, a variable and a list of activations: ``prepared_environment`` writes
a ``sitecustomize.py`` and the list into the directory, puts the directory first on ``PYTHONPATH``,
and names the list in a variable. Every Python process that the command starts then calls each
activation once its module was imported; a process that never imports it is left alone.
"""

from __future__ import annotations

from resumekit.launcher.environment import (
    VARIABLE,
    Activation,
    option_against_environment,
    prepared_environment,
)

__all__ = ["VARIABLE", "Activation", "option_against_environment", "prepared_environment"]
