"""What the journals of several runs say together."""

from __future__ import annotations

from pathlib import Path

from resumekit.record.comparison import WORDS, AttemptVerdict, verdicts
from resumekit.record.journal import DIRECTORY


def worst_verdict(directory: Path) -> AttemptVerdict | None:
    """The worst verdict in the journals below a directory; None without an attempt that resumed."""
    found = [one for path in directory.rglob(DIRECTORY) for one in verdicts(path)]
    return min(found, key=lambda one: WORDS.index(one.verdict.word), default=None)
