"""What a run left besides equal bits: its trace and its journals must say the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from resumekit.record.comparison import verdicts
from resumekit.record.journal import DIRECTORY
from resumekit.record.moments import CHECKPOINT, END, STEP, read_trace, records_of, steps_of
from resumekit.storage.directories import MANIFEST


def wrong_length(trace: Path, *, num_steps: int, save_every: int) -> str:
    """How an uninterrupted run differs from the steps and saves it was said to have; or empty.

    Args:
        trace: its trace.
        num_steps: every rank must have counted 1, 2, ... up to this.
        save_every: every rank must have committed each multiple of this.
    """
    for rank, attempts in read_trace(trace).items():
        steps = steps_of(attempts, STEP)
        if steps != list(range(1, num_steps + 1)):
            counted = f"{len(steps)} steps, from {steps[0]} to {steps[-1]}" if steps else "no step"
            return f"rank {rank} counted {counted}, expected 1 to {num_steps}"
        due = set(range(save_every, num_steps + 1, save_every))
        unsaved = due.difference(steps_of(attempts, CHECKPOINT))
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
        before = [attempt for attempt in attempts if attempt.launch < launch]
        now = [attempt for attempt in attempts if attempt.launch == launch]
        work = next(records_of(now, STEP, CHECKPOINT), None)
        if work is not None:
            return f"rank {rank} made a {work.kind} record of step {work.step}"
        if steps_of(before, END) and not steps_of(now, END):
            return f"rank {rank} did not find the end again"
    return ""


def changing_components(trace: Path) -> tuple[str, ...]:
    """The keys of the components that do not keep one state all through an uninterrupted run."""
    changing: dict[str, None] = {}
    for attempts in read_trace(trace).values():
        first: dict[str, Mapping[str, str]] = {}  # of this rank: the ranks' states may differ
        for record in records_of(attempts):
            for key, leaves in record.components.items():
                if first.setdefault(key, leaves) != leaves:
                    changing[key] = None
    return tuple(changing)


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
