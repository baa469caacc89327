"""Comparing the steps of a replay with what the run recorded, whatever has changed since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from resumekit.journal.comparison import Comparison
from resumekit.journal.files import Attempt
from resumekit.journal.records import GPUS, Header


def replayed(now: Header, recorded: Sequence[Attempt]) -> Comparison:
    """The comparison of a replay with the attempts of its run, before its first record.

    Changed code, options or libraries explain a difference elsewhere. Here the question is which
    step is the first that they change, so they are left out of the headers.

    Args:
        now: the header of the replay.
        recorded: the attempts of the run, oldest first.

    Raises:
        OSError: a file cannot be read.
    """
    after = now.resumed_step or 0
    own_rank = [each for each in recorded if each.header.rank == now.rank]
    return Comparison(
        _without_changes(now),
        [(_without_changes(each.header), each.records(after=after)) for each in own_rank],
    )


def _without_changes(header: Header) -> Header:
    kept = {
        name: header.environment[name] for name in ("device", GPUS) if name in header.environment
    }
    environment = {**kept, "deterministic": True}
    return replace(
        header, lineage=(), options={}, geometry={}, code={}, environment=environment, excluded=()
    )
