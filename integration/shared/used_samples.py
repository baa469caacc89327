"""Which samples the steps of a logical run used, whatever the number of launches and ranks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from resumekit.record.moments import RESUMED, STEP, read_trace
from resumekit.testing import Run


class Used(NamedTuple):
    """What one rank used in one step that counts: one that no later launch did again."""

    launch: int
    rank: int
    step: int
    epoch: int
    samples: list[int]


def ledger(run: Run) -> list[Used]:
    """Every step that counts, by launch, step and rank."""
    assert not run.failure, run.failure
    assert not run.missed_kills
    trace = read_trace(run.trace)
    resumed = {
        attempt.launch: record.step
        for attempt in trace[0]
        for record in attempt.records
        if record.kind == RESUMED
    }
    used = []
    for rank, attempts in trace.items():
        for attempt in attempts:
            until = resumed.get(attempt.launch + 1, 10**9)
            for record in attempt.records:
                if record.kind == STEP and record.step <= until:
                    # The position in a record is that of the next batch.
                    epoch = record.fields["epoch"] - (record.fields["batch"] == 0)
                    samples = record.fields["samples"]
                    used.append(Used(attempt.launch, rank, record.step, epoch, samples))
    return sorted(used)


def counts(used: Sequence[Used]) -> dict[int, Counter[int]]:
    """How often each sample was used, by epoch."""
    by_epoch: dict[int, Counter[int]] = defaultdict(Counter)
    for each in used:
        by_epoch[each.epoch].update(each.samples)
    return by_epoch
