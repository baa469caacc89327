"""The page about a replay: which steps, what was compared, and the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from resumekit.html_report.charts import Chart, Drawing, Line, Mark, Point, drawn
from resumekit.html_report.rendering import Headline, Table, causes_in_words, finding_rows, render
from resumekit.prove.causes import Cause, Finding, find_causes
from resumekit.record.journal import DIRECTORY, find_attempts
from resumekit.record.moments import Launch, Recording, losses, of_replay

if TYPE_CHECKING:
    from resumekit.replay import RankResult, ReplayResult

_MAX_DOTS = 200
_MIN_AROUND = 10  # steps of the run before and after those of the replay


def replay_page(result: ReplayResult, directory: Path, command: Sequence[str]) -> str:
    """The page as one HTML document.

    Args:
        result: of the replay.
        directory: of the run.
        command: that was replayed.

    Raises:
        OSError: the journal of the run cannot be read.
    """
    shown = next((each for each in result.ranks if each.difference), result.ranks[0])
    attempts = find_attempts(directory / DIRECTORY, rank=shown.rank)
    recorded = [record for each in attempts for record in each.records()]
    run, replayed = of_replay(recorded, shown.records, result.first_step - 1)
    findings = _findings(shown, run, replayed)
    return render(
        "replay.html.j2",
        title=f"Replay of {directory}",
        headline=_headline(result, findings),
        facts=_facts(result, command),
        chart=_loss_chart(result, run, replayed),
        rank=shown.rank,
        ranks=_rank_table(result),
        checkpoints=_checkpoint_table(result),
        notes=result.notes,
        **finding_rows(findings),
    )


def _findings(rank: RankResult, run: Recording, replayed: Recording) -> tuple[Finding, ...]:
    if rank.difference is None:
        return ()
    return tuple(
        replace(each, cause=Cause.CHANGED, evidence=f"{', '.join(rank.changes)}.")
        if each.cause is Cause.UNSAVED_VARIABLE and rank.changes
        else each
        for each in find_causes(run, replayed)
    )


def _headline(result: ReplayResult, findings: tuple[Finding, ...]) -> Headline:
    detail = causes_in_words(findings)
    if result.is_equal:
        return Headline("good" if result.compares_weights else "mild", result.verdict, detail)
    return Headline("bad" if result.is_different else "mild", result.verdict, detail)


def _facts(result: ReplayResult, command: Sequence[str]) -> list[tuple[str, str]]:
    last = result.first_step + result.num_steps - 1
    return [
        ("Steps", f"{result.first_step} to {last}"),
        ("Begins from", f"the checkpoint of step {result.first_step - 1}"),
        ("Ranks", str(len(result.ranks))),
        ("Files", "behind an overlay" if result.is_protected else "not protected"),
        ("Command", " ".join(command)),
    ]


def _loss_chart(result: ReplayResult, run: Recording, replayed: Recording) -> Drawing | None:
    first, num_steps = result.first_step, result.num_steps
    around = max(num_steps, _MIN_AROUND)
    shown = range(first - around, first + num_steps + around)
    lines = tuple(
        Line(name, points, is_wide=name == "run")
        for name, launch in (("run", run.moments), ("replay", replayed.launches[1]))
        if (points := _points(launch, shown))
    )
    marks = [Mark(first - 1, "resume", f"begins from step {first - 1}")]
    marks += [Mark(each.step, "save", f"{each.name}: {each.text}") for each in result.checkpoints]
    if result.first_difference is not None:
        step = result.first_difference[1].step
        marks.append(Mark(step, "difference", f"first difference at step {step}"))
    summary = f"The losses of the run and of the replay. {result.verdict}."
    has_dots = num_steps <= _MAX_DOTS
    return drawn(Chart("Loss over steps", summary, "step", "loss", lines, tuple(marks), has_dots))


def _points(launch: Launch, steps: range) -> tuple[Point, ...]:
    return tuple(point for point in losses(launch) if int(point[0]) in steps)


def _rank_table(result: ReplayResult) -> Table:
    names = tuple(dict.fromkeys(name for rank in result.ranks for name in rank.fields))
    rows = tuple(
        (
            *(str(rank.rank), str(rank.num_steps)),
            *(str(rank.fields.get(name, 0)) for name in names),
            "none" if rank.difference is None else str(rank.difference),
        )
        for rank in result.ranks
    )
    return Table(
        "The steps of each rank in which a value was compared with the journal of the run.",
        ("rank", "steps", *names, "first difference"),
        rows,
        numbers=range(1, 2 + len(names)),
    )


def _checkpoint_table(result: ReplayResult) -> Table | None:
    words = {True: "equal", False: "different", None: "not compared"}
    rows = tuple((each.name, words[each.is_equal], each.text) for each in result.checkpoints)
    if not rows:
        return None
    caption = "Checkpoints of the run, compared with those that the replay saved at their steps."
    tones = {"equal": "good", "different": "bad"}
    return Table(caption, ("checkpoint", "verdict", "found"), rows, tones=tones)
