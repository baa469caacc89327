"""The page about a run that was stopped and resumed, compared with one that never was.

``of_prove`` makes its values from the result of ``prove``; ``comparison_page`` needs nothing else,
so that another comparison can have the same page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resumekit.errors import TraceError
from resumekit.html_report.charts import Chart, Drawing, Line, Mark, drawn
from resumekit.html_report.rendering import Headline, causes_in_words, finding_rows, render
from resumekit.prove import LaunchSummary, Outcome, ProveResult, Trial
from resumekit.prove.causes import Finding, find_first_causes
from resumekit.record.moments import (
    Recording,
    first_step,
    losses,
    read_recordings,
)


@dataclass(frozen=True)
class LaunchRow:
    """One launch of the judged run.

    Args:
        number: from 0.
        began: the step that it resumed from, in words.
        num_repeated: the steps that it trained again.
        end: how it ended.
        seconds: its wall-clock time.
    """

    number: int
    began: str
    num_repeated: int
    end: str
    seconds: float


@dataclass(frozen=True)
class ComparedRun:
    """One judged run.

    Args:
        title: what was done to it.
        headline: the verdict on it.
        findings: the first difference of each component, causes first.
        launches: every launch, in order.
        recording: what it recorded.
        kills: the steps after which it was killed.
        rank: of the findings.
    """

    title: str
    headline: Headline
    findings: tuple[Finding, ...]
    launches: tuple[LaunchRow, ...]
    recording: Recording = field(repr=False)
    kills: tuple[int, ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class ComparisonContent:
    """Everything on the page.

    Args:
        title: what was compared.
        headline: the verdict.
        facts: names and values below it.
        reference: the run that was never stopped.
        runs: those that were compared with it.
    """

    title: str
    headline: Headline
    facts: tuple[tuple[str, str], ...]
    reference: Recording = field(repr=False)
    runs: tuple[ComparedRun, ...]


def comparison_page(comparison: ComparisonContent) -> str:
    """The page as one HTML document."""
    return render(
        "comparison.html.j2",
        title=comparison.title,
        comparison=comparison,
        sections=[_section(comparison.reference, run) for run in comparison.runs],
    )


# ---------------------------------------------------------------- of prove


def of_prove(result: ProveResult, traces: Path) -> ComparisonContent:
    """The comparison that ``prove`` made.

    Args:
        result: its answer.
        traces: the directory that it kept the runs in.

    Raises:
        TraceError: there is no trace of the uninterrupted run.
    """
    folder = "records" if result.is_recorded else "trace"
    references = read_recordings(traces / "reference" / folder)
    if not references:
        raise TraceError(str(traces), found="no trace", expected="a directory kept by prove")
    runs = tuple(_compared(trial, references, traces, folder) for trial in result.trials)
    kills = ", ".join(result.at) or f"random, seed {result.seed}"
    facts = [
        ("Steps", str(result.num_steps)),
        ("Ranks", str(result.world)),
        ("Kills", f"{result.num_kills_asked} ({kills})"),
        ("Uninterrupted run", f"{result.reference_seconds:.1f} s"),
    ]
    command = " ".join(result.command)
    return ComparisonContent(command, _headline(result, runs), tuple(facts), references[0], runs)


def _compared(
    trial: Trial, references: Mapping[int, Recording], traces: Path, folder: str
) -> ComparedRun:
    name = "killed" if trial.injected is None else f"without-{trial.injected.replace('/', '-')}"
    found = read_recordings(traces / name / folder)
    rank, findings = find_first_causes(references, found)
    plain = trial.injected is None
    title = "Killed and resumed" if plain else f"Resumed without {trial.injected}"
    return ComparedRun(
        title=title,
        headline=_headline_of(trial, findings),
        findings=findings,
        launches=tuple(_launch_row(trial, launch) for launch in trial.launches),
        recording=found.get(0, Recording({})),
        kills=tuple(
            launch.killed_after_step
            for launch in trial.launches
            if launch.was_killed and launch.killed_after_step is not None
        ),
        rank=rank,
    )


def _launch_row(trial: Trial, launch: LaunchSummary) -> LaunchRow:
    resumes = {one.launch: one for one in trial.verdict.resumes} if trial.verdict else {}
    resume = resumes.get(launch.number)
    end = f"SIGKILL {launch.where}"
    if not launch.was_killed:
        status = launch.exit_status
        end = "by itself" if status == 0 else f"exit status {status}"
    return LaunchRow(
        launch.number,
        f"step {resume.step}" if resume else "fresh start",
        resume.num_repeated_steps if resume else 0,
        end,
        launch.seconds,
    )


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


def _headline(result: ProveResult, runs: tuple[ComparedRun, ...]) -> Headline:
    if len(runs) == 1:
        return runs[0].headline
    good = sum(run.headline.tone != "bad" for run in runs)
    text = f"{good} of {len(runs)} negative controls as expected"
    detail = "One component was left out of each resume; the comparison has to name it."
    return Headline("good" if result.ok else "bad", text, detail)


# ---------------------------------------------------------------- sections


def _section(reference: Recording, run: ComparedRun) -> dict[str, Any]:
    return {"run": run, "chart": _loss_chart(reference, run), **finding_rows(run.findings)}


def _loss_chart(reference: Recording, run: ComparedRun) -> Drawing | None:
    lines = [Line("uninterrupted", losses(reference.moments), is_wide=True)]
    marks = [Mark(step, "kill", f"killed after step {step}") for step in run.kills]
    for number, launch in run.recording.launches.items():
        lines.append(Line(f"launch {number}", losses(launch)))
        first = first_step(launch)
        if number and first is not None:
            step = first.step - 1
            marks.append(Mark(step, "resume", f"launch {number} resumed at step {step}"))
    if run.findings:
        step = run.findings[0].moment.step
        marks.append(Mark(step, "difference", f"first difference at step {step}"))
    text = run.headline.text
    summary = f"The losses of the uninterrupted run and of each launch. {text}."
    return drawn(Chart("Loss over steps", summary, "step", "loss", tuple(lines), tuple(marks)))
