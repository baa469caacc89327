"""The page about runs that were stopped and resumed, compared with one that never was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resumekit.errors import TraceError
from resumekit.html_report.charts import Chart, Drawing, Line, Mark, drawn
from resumekit.html_report.rendering import Headline, causes_in_words, finding_rows, render
from resumekit.prove import Outcome, ProveResult, Trial
from resumekit.prove.causes import Finding, find_first_causes
from resumekit.record.moments import Recording, first_step, losses, read_recordings


def comparison_page(result: ProveResult, traces: Path) -> str:
    """The page as one HTML document.

    Args:
        result: of ``prove``.
        traces: the directory that it kept the runs in.

    Raises:
        TraceError: there is no trace of the uninterrupted run.
    """
    folder = "records" if result.is_recorded else "trace"
    references = read_recordings(traces / "reference" / folder)
    if not references:
        raise TraceError(str(traces), found="no trace", expected="a directory kept by prove")
    sections = [_section(trial, references, traces, folder) for trial in result.trials]
    kills = ", ".join(result.at) or f"random, seed {result.seed}"
    return render(
        "comparison.html.j2",
        title=" ".join(result.command),
        headline=_headline(result, [each["headline"] for each in sections]),
        facts=[
            ("Steps", str(result.num_steps)),
            ("Ranks", str(result.world)),
            ("Kills", f"{result.num_kills_asked} ({kills})"),
            ("Uninterrupted run", f"{result.reference_seconds:.1f} s"),
        ],
        sections=sections,
    )


def _section(
    trial: Trial, references: Mapping[int, Recording], traces: Path, folder: str
) -> dict[str, Any]:
    """One judged run: the verdict, and the first difference of each component."""
    name = "killed" if trial.injected is None else f"without-{trial.injected.replace('/', '-')}"
    found = read_recordings(traces / name / folder)
    rank, findings = find_first_causes(references, found)
    headline, judged = _headline_of(trial, findings), found.get(0, Recording({}))
    return {
        "trial": trial,
        "title": f"Resumed without {trial.injected}" if trial.injected else "Killed and resumed",
        "headline": headline,
        "rank": rank,
        "chart": _loss_chart(references[0], judged, trial, findings, headline.text),
        **finding_rows(findings),
    }


def _headline_of(trial: Trial, findings: tuple[Finding, ...]) -> Headline:
    causes = causes_in_words(findings)
    verdict = trial.verdict
    if trial.outcome is Outcome.FAILED:
        return Headline("bad", "FAILED: a launch after a kill failed", trial.failure)
    if verdict is None:
        return Headline("bad", "FAILED: nothing was traced", trial.failure)
    if trial.outcome is Outcome.EXACT:
        word, _, detail = str(verdict).partition(": ")
        return Headline("good", word, detail)
    if trial.outcome is Outcome.CAUGHT:
        return Headline("good", f"CAUGHT: {trial.injected} was left out, and named", causes)
    if trial.outcome is Outcome.NO_EFFECT:
        text = f"NO EFFECT: {trial.injected} has its initial state in every checkpoint"
        return Headline("mild", text, "Leaving it out changes nothing.")
    if trial.outcome is Outcome.NOT_REPRODUCIBLE:
        detail = "The two runs differ before the first kill. Seed the script."
        return Headline("mild", "NOT REPRODUCIBLE", detail)
    word = trial.outcome.value.upper()
    step = verdict.divergence.step if verdict.divergence else 0
    text = f"{word} at step {step}" if verdict.divergence else word
    return Headline("bad", text, causes or str(verdict.divergence or ""))


def _headline(result: ProveResult, of_runs: Sequence[Headline]) -> Headline:
    if len(of_runs) == 1:
        return of_runs[0]
    good = sum(each.tone != "bad" for each in of_runs)
    text = f"{good} of {len(of_runs)} negative controls as expected"
    detail = "One component was left out of each resume; the comparison has to name it."
    return Headline("good" if result.ok else "bad", text, detail)


def _loss_chart(
    reference: Recording, judged: Recording, trial: Trial, findings: Sequence[Finding], text: str
) -> Drawing | None:
    lines = [Line("uninterrupted", losses(reference.moments), is_wide=True)]
    kills = (each.killed_after_step for each in trial.launches if each.was_killed)
    marks = [Mark(n, "kill", f"killed after step {n}") for n in kills if n is not None]
    for number, launch in judged.launches.items():
        lines.append(Line(f"launch {number}", losses(launch)))
        first = first_step(launch)
        if number and first is not None:
            step = first.step - 1
            marks.append(Mark(step, "resume", f"launch {number} resumed at step {step}"))
    if findings:
        step = findings[0].moment.step
        marks.append(Mark(step, "difference", f"first difference at step {step}"))
    summary = f"The losses of the uninterrupted run and of each launch. {text}."
    return drawn(Chart("Loss over steps", summary, "step", "loss", tuple(lines), tuple(marks)))
