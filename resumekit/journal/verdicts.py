"""The verdict on every attempt of a run, computed from its journal files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from resumekit.journal.comparison import Comparison, Verdict
from resumekit.journal.files import DIRECTORY, Attempt, find_attempts
from resumekit.journal.header import Header, changes

_ID_DIGITS = 8  # of an attempt, in a lineage


@dataclass(frozen=True)
class AttemptVerdict:
    """The verdict on one rank of one attempt that resumed.

    Args:
        header: of the attempt.
        verdict: on the steps that it repeated.
    """

    header: Header
    verdict: Verdict


def verdicts(directory: Path) -> Iterator[AttemptVerdict]:
    """The verdict on each rank of each attempt that resumed, oldest first.

    Args:
        directory: the folder ``journal/`` of a run.

    Raises:
        OSError: a file cannot be read.
    """
    seen: list[Attempt] = []
    for attempt in find_attempts(directory):
        if attempt.header.resumed_step is not None:
            comparison = compared(attempt.header, seen)
            for record in attempt.records():
                comparison.add(record)
            yield AttemptVerdict(attempt.header, comparison.verdict)
        seen.append(attempt)


def lineage(directory: Path, now: Header, parent: str | None) -> tuple[str, ...]:
    """The lineage of an attempt, see ``Header``.

    Args:
        directory: the run directory.
        now: the header of the attempt, complete but for its lineage.
        parent: the attempt that wrote the checkpoint that it resumed from; None for a fresh start.
    """
    if parent is None:
        return (now.attempt[:_ID_DIGITS],)
    try:
        attempts = find_attempts(directory / DIRECTORY)
    except OSError:
        attempts = []
    headers = [each.header for each in attempts if each.header.attempt == parent]
    headers.sort(key=lambda header: header.rank != now.rank)
    if not headers:
        return (parent[:_ID_DIGITS],)
    then = headers[0]
    changed = changes(then, now)
    return (*then.lineage, now.attempt[:_ID_DIGITS]) if changed else then.lineage


def compared(now: Header, earlier: list[Attempt]) -> Comparison:
    """The comparison of an attempt with the earlier ones of its rank, before its first record.

    Args:
        now: the header of the attempt; it has resumed.
        earlier: the attempts before it, oldest first.

    Raises:
        OSError: a file cannot be read.
    """
    step = now.resumed_step or 0
    own = [each for each in earlier if each.header.rank == now.rank]
    return Comparison(now, [(each.header, each.records(after=step)) for each in own])
