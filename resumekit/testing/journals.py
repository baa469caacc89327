"""What the journals of a killed run say, for the kit: they must agree with the comparison."""

from __future__ import annotations

from pathlib import Path

from resumekit.journal import DIRECTORY, AttemptVerdict, verdicts
from resumekit.storage import MANIFEST


def journal_problem(directory: Path) -> str:
    """Why the journals of an exact run are wrong; empty if they are right.

    Each attempt that resumed must have repeated nothing, or identical steps.

    Args:
        directory: what the training function wrote, one run directory or several.
    """
    for run in sorted({path.parents[1] for path in directory.rglob(f"step-*/{MANIFEST}")}):
        if not any((run / DIRECTORY).glob("*.journal")):
            return f"{run.name} has no journal"
        for one in verdicts(run / DIRECTORY):
            if one.verdict.word not in ("identical", "nothing repeated") or one.verdict.loss:
                header = one.header
                return f"journal of attempt {header.number}, rank {header.rank}: {one.verdict}"
    return ""


def worst_verdict(directory: Path) -> AttemptVerdict | None:
    """The worst verdict in the journals below a directory; None without an attempt that resumed."""
    words = ("different", "not comparable", "identical", "nothing repeated")
    found = [one for path in directory.rglob(DIRECTORY) for one in verdicts(path)]
    return min(found, key=lambda one: words.index(one.verdict.word), default=None)
