"""The commit that a run's script belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# A slow file system must not hold up a job for a line in a report.
_LIMIT_SECONDS = 5.0


def repository_state(script: Path | None = None) -> dict[str, object] | None:
    """The commit of the repository around a script, and whether tracked files differ from it.

    Args:
        script: a file of the repository; by default the program that is running.

    Returns:
        ``{"commit", "dirty"}``, or None without git, without a repository or without a script.
    """
    script = script or _running_script()
    if script is None:
        return None
    commit = _git(script.parent, "rev-parse", "HEAD")
    if not commit:
        return None
    status = _git(script.parent, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def _running_script() -> Path | None:
    name = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(name).resolve() if name else None


def _git(directory: Path, *arguments: str) -> str | None:
    # GIT_OPTIONAL_LOCKS: looking at a repository must not write into it.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments],
            capture_output=True,
            text=True,
            timeout=_LIMIT_SECONDS,
            env=environment,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
