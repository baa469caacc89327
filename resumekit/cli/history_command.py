"""``history``: the attempts of a run, why each ended, and what that has cost."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from resumekit.cli.arguments import AsJson, Directory, existing

if TYPE_CHECKING:
    from resumekit.html_report import AttemptFacts, RunFacts

_EXIT_NOT_READ = 1
_COLUMNS = ("attempt", "began (UTC)", "ended", "resumed at", "steps", "lost", "end")


def facts_of(directory: Path) -> RunFacts:
    """What a run directory records.

    Raises:
        CheckpointNotFoundError: it is not that of a run.
    """
    from resumekit.cli.views import nothing_in
    from resumekit.html_report import read_run

    facts = read_run(existing(directory))
    if facts.is_empty:
        raise nothing_in(directory, "no run")
    return facts


def history(directory: Directory, as_json: AsJson = False) -> None:
    """List the attempts of a run: begin, end, why it ended, steps trained again, and goodput.

    Exit code 1 if a part of the record cannot be read.
    """
    from resumekit.cli.terminal import filled, new_table, print_json, print_line, print_table

    facts = facts_of(directory)
    rows = [_row(each) for each in facts.attempts]
    if rows and facts.is_running and not facts.attempts[-1].has_closed:
        rows[-1]["ending"] = "running"
    notes = list(_notes(facts))
    if as_json:
        known = [each.num_lost_steps or 0 for each in facts.attempts]
        found = {"is_running": facts.is_running, "finished": facts.finished, "attempts": rows}
        cost = {
            "repeated_steps": sum(known),
            "wall_seconds": facts.wall_seconds,
            "goodput": facts.goodput,
        }
        print_json({"directory": str(directory), **found, **cost, "notes": notes})
    else:
        if rows:
            print_table(filled(new_table(*_COLUMNS), [_cells(row) for row in rows]))
        if facts.goodput is not None and facts.wall_seconds is not None:
            digits = int(facts.wall_seconds < 10)
            print_line(
                f"goodput {facts.goodput:.1%}: of {facts.wall_seconds:.{digits}f} s since the "
                "first step on record, this part was spent in steps that count"
            )
        for note in notes:
            print_line(note)
    if facts.problems:
        raise typer.Exit(_EXIT_NOT_READ)


def _row(attempt: AttemptFacts) -> dict[str, Any]:
    return {
        "number": attempt.header.number,
        "attempt": attempt.header.attempt,
        "began": _time(attempt.began),
        "ended": _time(attempt.last_written),
        "resumed_step": attempt.header.resumed_step,
        "first_step": attempt.first_step,
        "last_step": attempt.last_step,
        "lost_steps": attempt.num_lost_steps,
        "lost_seconds": attempt.lost_seconds,
        "counted_seconds": attempt.counted_seconds,
        "verdict": attempt.verdict,
        "ending": attempt.ending,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    began, ended = (str(row[key] or "?")[:19].replace("T", " ") for key in ("began", "ended"))
    resumed = "start" if row["resumed_step"] is None else str(row["resumed_step"])
    steps = "-" if row["first_step"] is None else f"{row['first_step']}-{row['last_step']}"
    ended = ended[11:] if ended[:10] == began[:10] else ended
    lost = "-" if row["lost_steps"] is None else str(row["lost_steps"])
    return [str(row["number"]), began, ended, resumed, steps, lost, row["ending"]]


def _time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _notes(facts: RunFacts) -> list[str]:
    """What the record does not have."""
    attempts = facts.attempts
    numbers = {each.header.number for each in attempts}
    gaps = sorted(set(range(1, max(numbers, default=0))) - numbers)
    notes = [f"attempts without a record: {', '.join(map(str, gaps))}"] if gaps else []
    owner = facts.owner
    if owner is not None and owner.attempt not in {each.header.attempt for each in attempts}:
        notes.append(f"the last use of the directory ({owner}) has no step on record")
    if attempts and facts.goodput is None:
        notes.append("goodput: not known, begin or end of an attempt is not recorded")
    return notes + [f"not read: {problem}" for problem in facts.problems]
