"""What does a framework's own resume lose? Scripts without resumekit, judged by ``prove``.

Each script of ``stock_cases.py`` resumes as the documentation of its framework recommends. It runs
once uninterrupted, and once killed by SIGKILL and launched again; the table has what differs first.

    python benchmarks/stock_resume.py [--only FRAMEWORK] [--record]

Scripts of frameworks that are not installed are reported and left out.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from measuring import Findings, parser_for, version_of
from rich.console import Console
from stock_cases import CASES, PACKAGES, Case, Loss

from resumekit.errors import ProveError
from resumekit.prove import Outcome, ProveResult, prove

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 300.0

# One thread, so that sums stay in one order, and the CPU, so that every framework stays on it.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}

HEADINGS = ("framework", "script", "ranks", "killed at", "resumed at", "its own resume")


def judged(case: Case) -> ProveResult:
    """The answer of ``prove`` on the script and its own resume."""
    return prove(
        case.command(),
        at=(f"step:{case.kill}",),
        world=case.world,
        relaunch=case.relaunch_command(),
        timeout_seconds=TIMEOUT_SECONDS,
    )


def loss_in(result: ProveResult) -> Loss | None:
    """What the resume has lost; None where the run is EXACT.

    Raises:
        ProveError: the relaunch failed, or the runs differ before the kill.
    """
    (trial,) = result.trials
    verdict = trial.verdict
    if verdict is None or trial.outcome not in (Outcome.EXACT, Outcome.DIVERGED):
        found = f"{trial.outcome.value}: {trial.failure or verdict}"
        raise ProveError(" ".join(result.command), found=found, expected="a resume to compare")
    first = verdict.divergence
    if first is None:
        return None
    also = {each.component for each in verdict.firsts} - {first.component}
    return Loss(first.component, first.step, frozenset(also))


def row_of(case: Case, result: ProveResult) -> tuple[str, ...]:
    """The cells of one script."""
    (trial,) = result.trials
    resumes = trial.verdict.resumes if trial.verdict else ()
    resumed = ", ".join(str(resume.step) for resume in resumes)
    names = (case.framework, str(case), str(case.num_ranks), f"step {case.kill}")
    return (*names, f"step {resumed}", str(loss_in(result) or "EXACT"))


def found_in(rows: list[tuple[str, ...]]) -> Findings:
    """The table, and the machine with what is installed of the frameworks."""
    return Findings(
        "stock-resume",
        title="",
        headings=HEADINGS,
        rows=rows,
        packages=list(PACKAGES.values()),
        heading="What a framework's own resume loses",
        before=[
            "`python benchmarks/stock_resume.py --record`: each script of",
            "`integration/user_scripts/official`, which has no line of resumekit and resumes as",
            "its framework's documentation recommends, was judged by `resumekit prove --at`.",
            "On the CPU, one thread for each process.",
        ],
        after=[
            "A divergence is the first step that differs from the run that was never killed: the",
            "component that differs first, which is the likely cause, then all others that differ",
            "in that step or later. `data` is the batch, `rng` the state of a generator.",
        ],
    )


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--only", action="append", choices=PACKAGES, help="repeatable")
    arguments = parser.parse_args()
    if arguments.only and arguments.record:
        parser.error("--record writes the whole table; leave --only out")
    os.environ.update(ENVIRONMENT)

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    rows = []
    for case in CASES:
        if case.framework not in (arguments.only or PACKAGES):
            continue
        if version_of(PACKAGES[case.framework]) is None:
            console.print(f"{case}: {case.framework} is not installed, left out", style="yellow")
            continue
        began = time.monotonic()
        rows.append(row_of(case, judged(case)))
        seconds = time.monotonic() - began
        console.print(f"{' | '.join(rows[-1])} ({seconds:.0f} s)", style="dim")
    found = found_in(rows)
    print("\n".join(found.markdown()))
    if arguments.record:
        print(f"written: {found.record().relative_to(ROOT)}")


if __name__ == "__main__":
    main()
