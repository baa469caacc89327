"""Compares each attempt of a run with the earlier ones, also where the samples are regrouped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resumekit.journal.comparison import Comparison, Verdict
from resumekit.journal.files import DIRECTORY, Attempt, find_attempts
from resumekit.journal.records import STEP, Has, Header, Record, changes, divides_otherwise

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
    related = [each for each in earlier if each.header.rank == now.rank]
    return Comparison(now, [(each.header, each.records(after=step)) for each in related])


_MODULUS = 2**64


@dataclass
class Used:
    """The samples that one rank, or all of them, have used since a resume, within one epoch.

    Args:
        num_samples: how many.
        ids_sum: the sum of their hashes modulo 2**64.
        is_known: whether all had ids, and the epoch of the first step is not over.
        epoch: of the first step; None before it.
    """

    num_samples: int = 0
    ids_sum: int = 0
    is_known: bool = True
    epoch: int | None = None

    def add(self, record: Record) -> None:
        """Adds the samples of a step."""
        self.epoch = record.epoch if self.epoch is None else self.epoch
        if record.epoch != self.epoch or not record.has & Has.IDS:
            self.is_known = False
        self.num_samples += record.num_samples
        self.ids_sum = (self.ids_sum + record.ids_sum) % _MODULUS


def sum_over_ranks(used: Sequence[Used]) -> Used:
    """What several ranks have used together."""
    return Used(
        sum(each.num_samples for each in used),
        sum(each.ids_sum for each in used) % _MODULUS,
        all(each.is_known for each in used),
    )


@dataclass(frozen=True)
class EarlierUse:
    """What the latest earlier attempt has used from here on.

    Args:
        sums: of hashes, by number of samples; empty where a rank's journal is missing or has no
            sample ids, and where steps can be compared one by one.
        proves: whether other samples prove the resume wrong.
    """

    sums: dict[int, int] = field(default_factory=dict)
    proves: bool = False


def earlier_use(now: Header, earlier: Sequence[Attempt]) -> EarlierUse:
    """The samples to compare with in an attempt of another geometry.

    Args:
        now: the header of the attempt; it has resumed.
        earlier: the attempts of all ranks before it, oldest first.

    Raises:
        OSError: a file cannot be read.
    """
    related = [each for each in earlier if each.header.lineage[:1] == now.lineage[:1]]
    for number in sorted({each.header.number for each in related}, reverse=True):
        files = [each for each in related if each.header.number == number]
        then = files[0].header
        if not changes(then, now):
            break
        first = [each for each in files if each.header.writes_share]
        steps = [_steps(each, after=now.resumed_step or 0) for each in first]
        if len(files) == then.world_size and steps and all(steps):
            return EarlierUse(_added_up(steps), divides_otherwise(then, now))
    return EarlierUse()


def _steps(attempt: Attempt, *, after: int) -> dict[int, Record]:
    records = [each for each in attempt.records(after=after) if each.kind == STEP]
    return {each.step: each for each in records}


def _added_up(ranks: Sequence[dict[int, Record]]) -> dict[int, int]:
    total, found = Used(), {}
    step = min(map(min, ranks))
    while all(step in rank for rank in ranks):
        for rank in ranks:
            total.add(rank[step])
        if not total.is_known:
            break
        found[total.num_samples] = total.ids_sum
        step += 1
    return found
