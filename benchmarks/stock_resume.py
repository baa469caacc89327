"""What does a framework's own resume lose? Scripts without resumekit, judged by ``prove``.

Each script of ``stock_cases.py`` resumes as the documentation of its framework recommends. It runs
once uninterrupted, and once killed by SIGKILL and launched again; the table has what differs first.

    python benchmarks/stock_resume.py [--only FRAMEWORK] [--record]
    python benchmarks/stock_resume.py --examples [--record]

The second form judges the programs of ``examples``, which resume with resumekit, and their twins,
which do not. Scripts of frameworks that are not installed are reported and left out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from measuring import Findings, parser_for, version_of
from rich.console import Console
from stock_cases import CASES, EXAMPLE_CASES, PACKAGES, Case, ExampleCase, Loss

from resumekit.errors import ProveError
from resumekit.prove import Outcome, ProveResult, prove

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 300.0

# One thread, so that sums stay in one order, and the CPU, so that every framework stays on it.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}

HEADINGS = ("framework", "script", "ranks", "killed at", "resumed at", "its own resume")

EXAMPLE_HEADINGS = ("example", "framework", "lines", "its own resume", "resumekit")


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


def judged_example(example: ExampleCase) -> ProveResult:
    """The answer of ``prove`` on an example, which is killed twice at random times."""
    return prove(example.command(), kills=2, world=example.world, timeout_seconds=TIMEOUT_SECONDS)


def row_of_example(example: ExampleCase) -> tuple[str, ...]:
    """The cells of one example and its twin."""
    result = judged_example(example)
    (trial,) = result.trials
    ours = f"{trial.outcome.value}: {trial.failure or trial.verdict}"
    if result.ok:
        ours = f"EXACT: {result.num_steps} steps, {len(trial.resumes)} resumes"
    stock = str(loss_in(judged(example.stock)) or "EXACT")
    return (f"{example}.py", example.framework, example.changed_lines(), stock, ours)


def found_in_examples(rows: list[tuple[str, ...]]) -> Findings:
    """The table of the examples, and the machine."""
    return Findings(
        "examples",
        title="",
        headings=EXAMPLE_HEADINGS,
        rows=rows,
        packages=[*PACKAGES.values(), "peft"],
        heading="The examples and their stock twins",
        before=[
            "`python benchmarks/stock_resume.py --examples --record`: each program of `examples`",
            "was judged by `resumekit prove --kills 2`, and its twin in `examples/stock` by",
            "`resumekit prove --at`. On the CPU, one thread for each process.",
        ],
        after=[
            "`+` counts the lines that only the example has, `-` those that only its twin has,",
            "without docstrings and empty lines.",
        ],
    )


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
    parser.add_argument("--examples", action="store_true", help="the programs of examples/")
    arguments = parser.parse_args()
    if arguments.only and (arguments.record or arguments.examples):
        parser.error("--record and --examples are about a whole table; leave --only out")
    os.environ.update(ENVIRONMENT)

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    rows = []
    cases: Iterable[Case | ExampleCase] = EXAMPLE_CASES
    if not arguments.examples:
        cases = _installed(arguments.only, console)
    for case in cases:
        began = time.monotonic()
        if isinstance(case, ExampleCase):
            rows.append(row_of_example(case))
        else:
            rows.append(row_of(case, judged(case)))
        seconds = time.monotonic() - began
        console.print(f"{' | '.join(rows[-1])} ({seconds:.0f} s)", style="dim")
    found = found_in_examples(rows) if arguments.examples else found_in(rows)
    print("\n".join(found.markdown()))
    if arguments.record:
        print(f"written: {found.record().relative_to(ROOT)}")


def _installed(only: list[str] | None, console: Console) -> Iterator[Case]:
    for case in CASES:
        if case.framework not in (only or PACKAGES):
            continue
        if version_of(PACKAGES[case.framework]) is None:
            console.print(f"{case}: {case.framework} is not installed, left out", style="yellow")
            continue
        yield case


if __name__ == "__main__":
    main()
