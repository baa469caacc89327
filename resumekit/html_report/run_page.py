"""The page about a run directory: what it concludes, its charts and its tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from resumekit.html_report.charts import Chart, Line, Mark, Point, drawn
from resumekit.html_report.rendering import Headline, render
from resumekit.html_report.run_facts import (
    AttemptFacts,
    CheckpointFacts,
    RunFacts,
    changed_settings,
)
from resumekit.progress_display import human_bytes
from resumekit.record.journal import Event
from resumekit.storage.manifest import Manifest


def run_page(run: RunFacts) -> str:
    """The page as one HTML document."""
    newest = run.newest.manifest if run.newest else None
    capture = _capture(newest) if newest else []
    wanted = (_loss_chart(run), _cost_chart(run), _size_chart(run))
    return render(
        "run.html.j2",
        title=f"{run.directory.resolve().name}: report of a run",
        directory=str(run.directory),
        headline=headline(run),
        facts=_facts(run),
        charts=[each for each in map(drawn, wanted) if each is not None],
        has_loss=any(each.losses for each in run.attempts),
        attempts=[_attempt_row(run, index) for index in range(len(run.attempts))],
        resumes=list(_resumes(run)),
        what=_what(run, newest),
        capture=capture,
        are_exact=_all_exact(capture),
        newest=run.newest.name if run.newest else "",
        checkpoints=[_checkpoint_row(run, each) for each in run.checkpoints],
        num_bytes=human_bytes(_disk_bytes(run)),
        problems=run.problems,
        quarantined=run.quarantined,
    )


def _what(run: RunFacts, newest: Manifest | None) -> str:
    """The script, and the days on which it ran."""
    times = [each.began for each in run.attempts[:1]] + [each.last_written for each in run.attempts]
    days = [_utc(each)[:10] for each in times if each is not None]
    script, *arguments = map(str, (newest and newest.fingerprint.get("command")) or [""])
    words = [" ".join([Path(script).name, *arguments])]
    words.append(" to ".join(dict.fromkeys([*days[:1], *days[-1:]])))
    return ", ".join(filter(None, words))


def headline(run: RunFacts) -> Headline:
    """What the page concludes."""
    different = [each for each in run.attempts if each.is_different]
    newest = run.newest
    if newest is None or newest.manifest is None:
        text = "No checkpoint to resume from"
        why = "The next launch starts from step 0."
        if run.is_running and not run.checkpoints:
            return Headline("mild", "Running, nothing saved yet", "No checkpoint was made so far.")
        return Headline("bad", text, why)
    step = newest.manifest.step
    if different:
        numbers = ", ".join(str(each.header.number) for each in different)
        text = f"Attempt {numbers} did not repeat the steps exactly"
        return Headline("bad", text, different[0].verdict)
    detail = f"{_judgement(run)} Newest valid checkpoint: {newest.name}."
    if run.finished is not None:
        return Headline("good", f"Finished at step {step} ({run.finished})", detail)
    if run.is_running:
        return Headline("good", f"Running; resumable from step {step}", detail)
    return Headline("good", f"Resumable from step {step}", detail)


def _judgement(run: RunFacts) -> str:
    resumed = [each for each in run.attempts if each.verdict]
    if not resumed:
        return "The run was never resumed."
    words = {each.verdict.partition(": ")[2].partition(" ")[0] for each in resumed}
    repeated = sum(each.num_lost_steps or 0 for each in run.attempts)
    if words <= {"identical", ""}:
        return f"{_count(len(resumed), 'resume')}, {_count(repeated, 'repeated step')}: identical."
    return f"{_count(len(resumed), 'resume')}; not every repeated step could be compared."


def _facts(run: RunFacts) -> list[tuple[str, str]]:
    stops = run.attempts[:-1]
    last = [each.last_step for each in run.attempts if each.last_step is not None]
    ranks = list(dict.fromkeys(str(each.header.world_size) for each in run.attempts))
    facts = [
        ("Attempts", str(len(run.attempts))),
        ("Steps trained", str(max(last, default=0))),
        ("Steps trained again", _lost_in_all(stops)),
        ("Ranks", " → ".join(ranks) or "-"),
        ("Checkpoints kept", f"{len(run.checkpoints)}, {human_bytes(_disk_bytes(run))}"),
    ]
    if run.is_running and run.owner:
        facts.append(("Running as", f"process {run.owner.pid} on {run.owner.host}"))
    return facts


def _lost_in_all(stops: Sequence[AttemptFacts]) -> str:
    steps = sum(each.num_lost_steps or 0 for each in stops)
    seconds = [each.lost_seconds for each in stops if each.lost_seconds is not None]
    is_known = stops and len(seconds) == len(stops)
    time = f" ({sum(seconds):.1f} s)" if is_known else ""
    return f"{steps}{time} after {_count(len(stops), 'stop')}"


# ---------------------------------------------------------------- charts


def _loss_chart(run: RunFacts) -> Chart:
    recorded = [each for each in run.attempts if each.losses]
    lines = [Line(f"attempt {each.header.number}", each.losses) for each in recorded]
    repeated = [point for each in _repeated(run) for point in each]
    if repeated:
        lines.append(Line("trained again later", tuple(repeated), is_wide=True))
    marks: list[Mark] = []
    for each, later in zip(run.attempts, run.attempts[1:], strict=False):
        if each.last_step is None:
            continue
        text = f"attempt {each.header.number} stopped after step {each.last_step}"
        marks.append(Mark(each.last_step, "kill", text))
        resumed = later.header.resumed_step or 0
        text = f"attempt {later.header.number} resumed from step {resumed}"
        marks.append(Mark(resumed, "resume", text))
    return Chart(
        "Loss over steps",
        f"{_count(len(recorded), 'attempt')} drawn over each other; {_judgement(run)}",
        "step",
        "loss",
        tuple(lines),
        tuple(marks),
    )


def _repeated(run: RunFacts) -> Iterator[list[Point]]:
    """The losses that a later attempt recorded again, each range ending in a gap."""
    for then, now in zip(run.attempts, run.attempts[1:], strict=False):
        resumed = now.header.resumed_step or 0
        points = [point for point in then.losses if point[0] > resumed]
        if points:
            yield [*points, (points[-1][0], math.nan)]


def _cost_chart(run: RunFacts) -> Chart:
    costs = [cost for each in run.attempts for cost in each.costs]
    blocked = [(each.step, each.blocked_seconds * 1000) for each in sorted(costs, key=_step_of)]
    background = [
        # A record has the time of the background save before it, which is the earlier one.
        (then.step, now.background_seconds * 1000)
        for each in run.attempts
        for then, now in pairwise(each.costs)
        if now.background_seconds
    ]
    lines = [Line("training stood still", tuple(blocked))] if blocked else []
    if background:
        lines.append(Line("written in the background", tuple(sorted(background))))
    return Chart(
        "Cost of the saves",
        "One point per save of the first rank.",
        "step",
        "ms",
        tuple(lines),
        has_dots=True,
        from_zero=True,
    )


def _step_of(cost: Event) -> int:
    return cost.step


def _size_chart(run: RunFacts) -> Chart:
    found = [
        (each.manifest.step, (each.num_bytes - each.num_shared_bytes) / 1e6)
        for each in reversed(run.checkpoints)
        if each.manifest
    ]
    line = Line("size without shared files", tuple(found))
    lines = (line,) if len(found) > 2 else ()
    return Chart(
        "Size of the kept checkpoints",
        "One point per checkpoint.",
        "step",
        "MB",
        lines,
        has_dots=True,
        from_zero=True,
    )


# ---------------------------------------------------------------- tables


def _attempt_row(run: RunFacts, index: int) -> dict[str, Any]:
    each = run.attempts[index]
    environment = each.header.environment
    versions = ("torch", "transformers", "accelerate", "lightning", "deepspeed", "resumekit")
    resumed = each.header.resumed_step
    steps = "none"
    if each.first_step is not None:
        steps = f"{each.first_step} to {each.last_step}"
    return {
        "number": each.header.number,
        "began": "fresh start" if resumed is None else f"step {resumed}",
        "steps": steps,
        "began_at": "-" if each.began is None else _utc(each.began),
        "last_written": _utc(each.last_written),
        "end": _end(run, index),
        "lost": _lost(each),
        "verdict": each.verdict or "-",
        "class": "bad" if each.is_different else "",
        "ranks": each.header.world_size,
        "device": environment.get("device", ""),
        "versions": ", ".join(f"{n} {environment[n]}" for n in versions if n in environment),
    }


def _end(run: RunFacts, index: int) -> str:
    each = run.attempts[index]
    if index + 1 < len(run.attempts):
        words = {None: "stopped", True: "ended by itself", False: "killed"}[each.has_closed]
        if each.num_lost_steps:
            return f"{words} after step {each.last_step}, not saved"
        return f"{words} right after a save"
    if run.is_running:
        return "is running"
    newest = run.newest.manifest if run.newest else None
    if newest and newest.finished is not None and newest.attempt == each.header.attempt:
        return f"finished ({newest.finished})"
    return "killed" if each.has_closed is False else "ended before the run was over"


def _lost(each: AttemptFacts) -> str:
    if each.num_lost_steps is None:
        return "-"
    seconds = each.lost_seconds
    return f"{each.num_lost_steps}" + ("" if seconds is None else f", {seconds:.1f} s")


def _resumes(run: RunFacts) -> Iterator[dict[str, Any]]:
    """What each resume restored and reported."""
    manifests = [each.manifest for each in run.checkpoints if each.manifest]
    for then, now in zip(run.attempts, run.attempts[1:], strict=False):
        header = now.header
        begins = "a fresh start" if header.resumed_step is None else f"step {header.resumed_step}"
        notes = [f"not restored: {name}" for name in header.excluded]
        notes += [f"changed: {line}" for line in changed_settings(then.header, header)]
        written = next((each for each in manifests if each.attempt == header.attempt), None)
        if written is not None:
            notes += [
                f"reported: {line}"
                for entry in written.details.get("changes", ())
                if entry.get("step") == header.resumed_step
                for line in entry.get("changes", ())
            ]
        yield {
            "title": f"Attempt {header.number}, from {begins}",
            "restored": (restored := [] if written is None else _capture(written)),
            "are_exact": _all_exact(restored),
            "notes": notes,
        }


def _capture(manifest: Manifest) -> list[tuple[str, str, str]]:
    """Component, fidelity and reason; first what is not exact."""
    rows = []
    for key, line in manifest.capture.items():
        word = line.get("fidelity") or "not used"
        rows.append((key, str(word), str(line.get("reason", ""))))
    order = {"exact": 1, "not used": 2}
    return sorted(rows, key=lambda row: order.get(row[1], 0))


def _all_exact(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """The components, where all are exact."""
    used = [(key, word) for key, word, _ in rows if word != "not used"]
    return [key for key, _ in used] if all(word == "exact" for _, word in used) else []


def _checkpoint_row(run: RunFacts, each: CheckpointFacts) -> dict[str, Any]:
    if each.manifest is None:
        return {"name": each.name, "state": each.problem, "class": "bad"}
    manifest = each.manifest
    numbers = {one.header.attempt: one.header.number for one in run.attempts}
    metric = manifest.metric
    state = "valid" if manifest.finished is None else f"valid, finished ({manifest.finished})"
    return {
        "name": each.name,
        "epoch": manifest.progress.get("epoch", ""),
        "created": _time(manifest.created),
        "attempt": numbers.get(manifest.attempt, "-"),
        "size": human_bytes(each.num_bytes),
        "shared": human_bytes(each.num_shared_bytes) if each.num_shared_bytes else "-",
        "metric": "-" if metric is None else f"{metric['name']} {_number(metric['value'])}",
        "state": state,
        "class": "good",
    }


def _disk_bytes(run: RunFacts) -> int:
    return sum(each.num_bytes - each.num_shared_bytes for each in run.checkpoints)


def _number(value: str) -> str:
    return f"{float.fromhex(value):.6g}"


def _time(text: str) -> str:
    return text.replace("T", " ")[: len("2026-01-31 12:00:00")]


def _utc(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
