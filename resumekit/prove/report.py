"""The answer of ``prove`` as text for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from resumekit.cadence import parse_cadence
from resumekit.prove.result import Outcome, ProveResult, Trial, Verdict

_STYLES = {
    Outcome.EXACT: "bold green",
    Outcome.WITHIN_TOLERANCE: "yellow",
    Outcome.CAUGHT: "green",
    Outcome.NO_EFFECT: "yellow",
}


def print_result(result: ProveResult, console: Console | None = None) -> None:
    """Prints launches, digests and the verdict.

    Args:
        result: what ``prove`` gave.
        console: where to print; stdout without it.
    """
    console = Console(highlight=False) if console is None else console
    ranks = "" if result.world == 1 else f" on {result.world} ranks"
    console.print(Text(f"{' '.join(result.command)}{ranks}", style="bold"), soft_wrap=True)
    console.print(
        f"never killed: {result.num_steps} steps in {result.reference_seconds:.1f} s", style="dim"
    )
    if result.save_every is not None:
        console.print(Text(_attached_line(result), style="dim"), soft_wrap=True)
    plain = [trial for trial in result.trials if trial.injected is None]
    for trial in plain:
        console.print(_launch_table(trial))
        if trial.digests:
            console.print(_digest_table(result, trial))
        if trial.verdict and len(trial.verdict.firsts) > 1:
            console.print(_firsts_table(trial.verdict))
        _print_verdict(result, trial, console)
    injected = [trial for trial in result.trials if trial.injected is not None]
    if injected:
        console.print(_injection_table(injected))


def _attached_line(result: ProveResult) -> str:
    assert result.save_every is not None
    is_control = any(trial.injected for trial in result.trials)
    runs = "killed runs and to the uninterrupted one" if is_control else "killed run alone"
    cadence = parse_cadence(result.save_every)
    return f"with resumekit: a ResumeCallback is attached to the {runs}, it saves {cadence}"


def _launch_table(trial: Trial) -> Table:
    table = Table("launch", "resumed from step", "repeated steps", "ended", "seconds")
    for launch in trial.launches:
        resume = trial.resumes.get(launch.number)
        table.add_row(
            str(launch.number),
            str(resume.step) if resume else "-",
            str(resume.num_repeated_steps) if resume else "-",
            launch.end,
            f"{launch.seconds:.1f}",
        )
    return table


def _digest_table(result: ProveResult, trial: Trial) -> Table:
    """The last state, component by component, of both runs."""
    table = Table("last state", "never killed", "killed", "")
    for key in dict.fromkeys([*result.reference_digests, *trial.digests]):
        then, now = result.reference_digests.get(key, "absent"), trial.digests.get(key, "absent")
        same = Text("equal", "green") if then == now else Text("differs", "red")
        table.add_row(key, then, now, same)
    return table


def _firsts_table(verdict: Verdict) -> Table:
    """Where each component differs first: what comes first is the likely cause."""
    table = Table("differs", "launch", "rank", "first at step", "in")
    for one in verdict.firsts:
        table.add_row(one.component, str(one.launch), str(one.rank), str(one.step), Text(one.leaf))
    return table


def _print_verdict(result: ProveResult, trial: Trial, console: Console) -> None:
    if trial.num_kills < result.num_kills_asked:
        console.print(
            f"The run was over after {trial.num_kills} of {result.num_kills_asked} kills.",
            style="yellow",
        )
    if trial.num_left_behind:
        console.print(
            f"Processes that outlived the command and were killed: {trial.num_left_behind}.",
            style="yellow",
        )
    if trial.recorder_failure:
        line = f"The recorder stopped, and what it saw is not compared: {trial.recorder_failure}"
        console.print(Text(line, style="yellow"))
    for note in trial.verdict.notes if trial.verdict else ():
        console.print(f"{note}.", style="yellow")
    text = f"{trial.verdict}" if trial.verdict else "FAILED: nothing was traced"
    if trial.outcome is Outcome.FAILED:
        text = f"FAILED: a launch after a kill failed, {trial.failure}"
    # Not wrapped: one line for a reader of a log, too.
    console.print(Text(text, style=_STYLES.get(trial.outcome, "bold red")), soft_wrap=True)
    for cause in trial.causes:
        console.print(Text(f"Likely cause: {cause}"), soft_wrap=True)


def _injection_table(trials: list[Trial]) -> Table:
    table = Table("left out", "outcome", "first difference and likely cause", "seconds")
    for trial in trials:
        outcome = Text(trial.outcome.value, style=_STYLES.get(trial.outcome, "bold red"))
        divergence = trial.verdict.divergence if trial.verdict else None
        found = str(divergence) if divergence else (trial.failure or "none")
        found = "\n".join([found, *trial.causes])
        table.add_row(trial.injected, outcome, Text(found), f"{trial.seconds:.1f}")
    return table
