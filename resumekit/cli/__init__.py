"""The ``resumekit`` command: one function for each word that may follow it."""

from resumekit.cli.commands import main

__all__ = ["main"]
