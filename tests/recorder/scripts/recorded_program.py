"""Runs a program in this process as a launch of ``prove`` does: the hooks are there before it."""

from __future__ import annotations

import runpy
from typing import Any

from resumekit.recorder import record_torch


def run(directory: str, *, program: str, settings: dict[str, Any]) -> None:
    """Runs the file ``program``; the recorder has these settings."""
    record_torch(settings)
    runpy.run_path(program, run_name="__main__")
