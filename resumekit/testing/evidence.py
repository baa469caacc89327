"""What the trace of a run shows besides bits: was it the run that its test believes it to be?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from resumekit.prove import CHECKPOINT, END, STEP, read_trace


def wrong_length(trace: Path, *, num_steps: int, save_every: int) -> str:
    """How an uninterrupted run differs from the steps and saves it was said to have; or empty.

    Args:
        trace: its trace.
        num_steps: every rank must have counted 1, 2, ... up to this.
        save_every: every rank must have committed each multiple of this.
    """
    for rank, attempts in read_trace(trace).items():
        records = [record for attempt in attempts for record in attempt.records]
        steps = [record.step for record in records if record.kind == STEP]
        if steps != list(range(1, num_steps + 1)):
            counted = f"{len(steps)} steps, from {steps[0]} to {steps[-1]}" if steps else "no step"
            return f"rank {rank} counted {counted}, expected 1 to {num_steps}"
        saved = {record.step for record in records if record.kind == CHECKPOINT}
        unsaved = set(range(save_every, num_steps + 1, save_every)) - saved
        if unsaved:
            return f"rank {rank} committed no checkpoint of step {min(unsaved)}"
    return ""


def work_of_launch(trace: Path, launch: int) -> str:
    """What a launch did that had nothing left to do; empty when it did nothing.

    A run that records its end must have recorded it again; the state in that record is for the
    comparison to judge.

    Args:
        trace: the trace of all launches.
        launch: the launch that came after the run had finished.
    """
    for rank, attempts in read_trace(trace).items():
        before = {
            record.kind
            for attempt in attempts
            if attempt.launch < launch
            for record in attempt.records
        }
        records = [
            record for attempt in attempts if attempt.launch == launch for record in attempt.records
        ]
        for record in records:
            if record.kind in (STEP, CHECKPOINT):
                return f"rank {rank} made a {record.kind} record of step {record.step}"
        if END in before and END not in {record.kind for record in records}:
            return f"rank {rank} did not find the end again"
    return ""


def changing_components(trace: Path) -> tuple[str, ...]:
    """The keys of the components that do not keep one state all through an uninterrupted run."""
    changing: dict[str, None] = {}
    for attempts in read_trace(trace).values():
        first: dict[str, Mapping[str, str]] = {}  # of this rank: the ranks' states may differ
        for record in (record for attempt in attempts for record in attempt.records):
            for key, leaves in record.components.items():
                if first.setdefault(key, leaves) != leaves:
                    changing[key] = None
    return tuple(changing)
