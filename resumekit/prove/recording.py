"""How each launch is recorded from inside, and what its records come to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from resumekit.launcher import Activation, prepared_environment
from resumekit.record.moments import FAILED, STEP, find_trace, records_of
from resumekit.recorder import RecorderSettings


def recorded_environment(
    environment: Mapping[str, str], directory: Path, settings: RecorderSettings
) -> dict[str, str]:
    """The environment of a launch whose training processes are recorded.

    Args:
        environment: of the launch otherwise.
        directory: an absent directory for the launcher.
        settings: what the recorder is asked for.
    """
    values = settings.as_dict()
    activations = (
        Activation("torch", "resumekit.recorder:record_torch", values),
        Activation("deepspeed", "resumekit.recorder:record_deepspeed", values),
    )
    return prepared_environment(environment, directory, activations)


def write_positions(directory: Path, traces: Iterable[Path]) -> Path:
    """Writes the weights that a relaunch may continue from, one file per rank.

    Args:
        directory: where to; made if missing.
        traces: the records of the uninterrupted run and of this run so far.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows: dict[int, list[list[object]]] = {}
    for trace in traces:
        for rank, attempts in find_trace(trace).items():
            for record in records_of(attempts, STEP):
                fields = record.fields
                row = [record.step, fields["weights"], fields["counter"], fields["lr"]]
                rows.setdefault(rank, []).append(row)
    for rank, listed in rows.items():
        (directory / f"rank-{rank:05d}.json").write_text(json.dumps(listed))
    return directory


def failure_of_recorder(directory: Path) -> str:
    """Why the recorder stopped; empty when it did not."""
    attempts = (attempt for each in find_trace(directory).values() for attempt in each)
    return next((record.fields["text"] for record in records_of(attempts, FAILED)), "")
