"""The ``resumekit`` command: ``demo``, ``prove``, ``list``, ``inspect``, ``verify``, ``export``."""

from resumekit.cli.commands import main

__all__ = ["main"]
