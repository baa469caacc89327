"""What does a framework's own resume forget? Stock scripts and their resumekit twins, judged alike.

``integration/scripts/stock_<framework>.py`` resumes as the framework's documentation recommends;
``train_<framework>.py`` is the same script with resumekit instead of that resume. Both go
through the same call of ``resumekit prove --at``: once uninterrupted, once killed by SIGKILL at the
same points and started again with the identical command, then compared step by step and bit by bit.

    python benchmarks/stock_resume.py [--only FRAMEWORK] [--record]

Frameworks that are not installed, and twins that are not there, are reported and left out.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from measuring import Findings, parser_for, version_of
from rich.console import Console

from resumekit.errors import ProveError
from resumekit.prove import Divergence, Outcome, ProveResult, prove

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "integration" / "scripts"

TIMEOUT_SECONDS = 300.0

# How many batches an epoch of every script has: the unit of the kill points below.
STEPS_PER_EPOCH = 29

# One thread, so that sums stay in one order, and the CPU, so that every framework stays on it.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Case:
    """One framework in one setting.

    Args:
        title: what the table calls it.
        framework: the end of the scripts' names.
        package: the distribution whose version is reported.
        options: further arguments of both scripts.
        world: ranks.
    """

    title: str
    framework: str
    package: str
    options: tuple[str, ...] = ()
    world: int = 1

    def script(self, kind: str) -> Path:
        """The ``stock`` or the ``train`` script."""
        return SCRIPTS / f"{kind}_{self.framework}.py"


@dataclass(frozen=True)
class Pattern:
    """Where a run is killed, and how often it saves."""

    title: str
    save_every: int
    kill_points: tuple[str, ...]


CASES = (
    Case("PyTorch", "torch", "torch"),
    Case("Accelerate", "accelerate", "accelerate"),
    Case("Trainer", "transformers", "transformers"),
    Case("Lightning", "lightning", "lightning"),
    Case("DeepSpeed, ZeRO 1", "deepspeed", "deepspeed", ("--stage", "1")),
    Case("DeepSpeed, ZeRO 1, 2 ranks", "deepspeed", "deepspeed", ("--stage", "1"), world=2),
)

PATTERNS = (
    Pattern("in the middle of the 2nd epoch", 10, (f"step:{STEPS_PER_EPOCH + 16}",)),
    Pattern("on an epoch's boundary", STEPS_PER_EPOCH, (f"step:{2 * STEPS_PER_EPOCH + 1}",)),
    Pattern(
        "twice in the 2nd epoch",
        10,
        (f"step:{STEPS_PER_EPOCH + 16}", f"step:{STEPS_PER_EPOCH + 26}"),
    ),
)


@dataclass(frozen=True)
class Answer:
    """What the judge said of one script, in words.

    Args:
        first: EXACT, or what differs first and what else in the same record.
        last: the components that differ in the last state; empty when none does or none is known.
    """

    first: str
    last: str = ""


@dataclass(frozen=True)
class Row:
    """One case under one pattern; without a twin, ``twin`` says why."""

    case: Case
    pattern: Pattern
    stock: Answer
    twin: Answer

    @property
    def cells(self) -> tuple[str, ...]:
        """As the table shows it."""
        return (
            self.case.title,
            f"{self.pattern.title} ({', '.join(self.pattern.kill_points)}; "
            f"saved every {self.pattern.save_every} steps)",
            self.stock.first,
            self.stock.last,
            self.twin.first,
        )


NO_ANSWER = "no answer"

HEADINGS = ("framework", "killed", "its own resume", "differs at the end", "resumekit")


# Measuring


def measure(case: Case, pattern: Pattern) -> Row:
    """Both scripts, through the same call."""
    return Row(case, pattern, answer(case, pattern, "stock"), answer(case, pattern, "train"))


def answer(case: Case, pattern: Pattern, kind: str) -> Answer:
    """The judge's words on one script."""
    script = case.script(kind)
    if not script.is_file() or (kind == "train" and "resumekit.adapters" not in script.read_text()):
        return Answer("not there yet")
    command = [sys.executable, str(script), "--directory", "{dir}/run", *case.options]
    command += ["--save-every", str(pattern.save_every)]
    try:
        result = prove(
            command, at=pattern.kill_points, world=case.world, timeout_seconds=TIMEOUT_SECONDS
        )
    except ProveError as error:
        return Answer(f"{NO_ANSWER}: {last_line(str(error))}")
    return in_words(result)


def in_words(result: ProveResult) -> Answer:
    """What one trial came to."""
    (trial,) = result.trials
    verdict = trial.verdict
    if trial.outcome is Outcome.EXACT:
        resumed = ", ".join(str(resume.step) for resume in verdict.resumes) if verdict else ""
        return Answer(f"EXACT ({result.num_steps} steps, resumed at {resumed})")
    if trial.outcome is Outcome.FAILED or verdict is None:
        return Answer(f"a relaunch fails: {last_line(trial.failure)}")
    divergence = verdict.divergence
    assert divergence is not None
    difference = first_difference(divergence)
    if trial.outcome is Outcome.NOT_REPRODUCIBLE:
        return Answer(f"NOT REPRODUCIBLE: {difference}")
    return Answer(difference, last_differences(result.reference_digests, trial.digests))


def first_difference(divergence: Divergence) -> str:
    """The first step that is wrong and all that is wrong in it, the likely cause first."""
    # The samples are a digest of the inputs here: which ones is not to be seen, only that.
    leaf = f": {divergence.leaf}" if divergence.leaf and divergence.component != "data" else ""
    others = f"; also {', '.join(divergence.others)}" if divergence.others else ""
    what = f"{divergence.component}{leaf}"
    if divergence.component == "run":
        what = f"{divergence.found}, expected {divergence.expected}"
    return f"DIVERGED at step {divergence.step}: {what}{others}"


def last_differences(expected: Mapping[str, str], found: Mapping[str, str]) -> str:
    """The components of the last state that are not as they should be."""
    names = dict.fromkeys([*expected, *found])
    wrong = [name for name in names if expected.get(name) != found.get(name)]
    right = [name for name in names if name not in wrong]
    return f"{', '.join(wrong) or 'nothing'}" + (f" (equal: {', '.join(right)})" if right else "")


def last_line(text: str) -> str:
    """The line that says it: the last that names an error, or else the last with a word in it."""
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w", line)]
    named = [line for line in lines if re.search(r"\w(Error|Exception)\b", line)]
    return (named or lines or ["no output"])[-1]


# Report


def found_by(rows: Sequence[Row], cases: Sequence[Case]) -> Findings:
    """The table, and the machine with what is installed of the frameworks."""
    return Findings(
        "stock-resume",
        title="",
        headings=HEADINGS,
        rows=[row.cells for row in rows],
        packages=[*dict.fromkeys(["torch", *(case.package for case in cases)])],
        heading="What a framework's own resume forgets",
        before=[
            "`python benchmarks/stock_resume.py --record`: each `integration/scripts/stock_*.py`,",
            "which resumes as its framework's documentation recommends, and its twin `train_*.py`",
            "go through the same call of `resumekit prove --at`. All train 3 epochs of",
            f"{STEPS_PER_EPOCH} steps with shuffled data, dropout, AdamW, a schedule and averaged",
            "weights (ema), without workers, on the CPU; one thread for each process.",
        ],
        after=[
            "A divergence is the first step that differs from the run that was never killed, the",
            "likely cause first, then all else that differs in that step: `data` is the batch,",
            "`rng` the state of a generator after the step, the others are the states and the",
            "loss after it. The Trainer shows its callbacks neither batch nor loss; a wrong batch",
            "would show in the weights.",
        ],
    )


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    names = tuple(dict.fromkeys(case.framework for case in CASES))
    parser.add_argument("--only", action="append", choices=names, help="this framework; repeatable")
    arguments = parser.parse_args()
    if arguments.only and arguments.record:
        parser.error("--record writes the whole table; leave --only out")
    os.environ.update(ENVIRONMENT)

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    cases = [case for case in CASES if case.framework in (arguments.only or names)]
    for case in [case for case in cases if version_of(case.package) is None]:
        console.print(f"{case.title}: {case.package} is not installed, left out", style="yellow")
        cases.remove(case)
    rows = []
    for case in cases:
        for pattern in PATTERNS:
            began = time.monotonic()
            rows.append(measure(case, pattern))
            seconds = time.monotonic() - began
            console.print(f"{' | '.join(rows[-1].cells)} ({seconds:.0f} s)", style="dim")
    found = found_by(rows, cases)
    print("\n".join(found.markdown()))
    if any(NO_ANSWER in cell for row in rows for cell in row.cells):
        raise SystemExit("there are rows without an answer; nothing is recorded")
    if arguments.record:
        print(f"written: {found.record().relative_to(ROOT)}")


if __name__ == "__main__":
    main()
