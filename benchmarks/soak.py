"""Kills trainings for hours: ``python benchmarks/soak.py [KIND ...]``, or ``nox -s soak``.

Each kind runs under ``resumekit prove``: uninterrupted, and with SIGKILLs at random times, of all
its processes. It saves in the background. The verdict is that of ``prove``: each step, batch and
bit equal. Two more are found without the library: the ledger, which the training itself writes,
and the bytes of the run directory without its journal. A kind is one part: its row is recorded as
it ends, and what the record of the day has is not run again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).with_name("results")
TRAINING = Path(__file__).with_name("soak_training.py")
KINDS = ("torch", "ddp", "trainer", "lightning", "zero")
RANKS = {"ddp": 2, "zero": 2}
EPOCHS = 12
TITLE = """# Soak: SIGKILL at random times

By `nox -s soak`. All processes of a training are killed at random times, and the same command is
launched again. The verdict is that of `resumekit prove`. Ledger: the training's own list of the
samples of each step, as it was last executed on each rank, beside that of the uninterrupted run.
Directory: the run directory without its journal, beside that of the uninterrupted run. The number
of ranks stays the same, and no disk is full here: other tests try both.

"""
Ledger = dict[int, str]  # the samples of each step


class Row(NamedTuple):
    """One line of the record."""

    kind: str
    ranks: str
    kills: str
    resumes: str
    steps: str
    verdict: str
    ledger: str
    directory: str
    seconds: str

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"

    @property
    def is_exact(self) -> bool:
        """Whether nothing was lost."""
        return self.verdict == "exact" and self.ledger == "equal"


def rows_of(record: Path) -> list[Row]:
    """The rows of a record; none where there is none."""
    lines = record.read_text().splitlines() if record.exists() else []
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [Row(*cells) for cells in found if len(cells) == len(Row._fields)][2:]


def soak(kind: str, num_kills: int, seed: int, kept: Path) -> Row:
    """The row of one kind; what the runs wrote is left in a directory."""
    began = time.monotonic()
    num_ranks = RANKS.get(kind, 1)
    kept.parent.mkdir(parents=True, exist_ok=True)
    result = kept.with_suffix(".json")
    command = [
        *(sys.executable, "-m", "resumekit.cli", "prove", f"--kills={num_kills}"),
        *(f"--seed={seed}", f"--json={result}", f"--world={num_ranks}", f"--keep={kept}"),
        *("--", "python", str(TRAINING), kind, "{dir}"),
    ]
    status = subprocess.run(command, check=False).returncode
    seconds = f"{time.monotonic() - began:.0f}"
    if not result.exists():
        verdict = f"exit code {status}"
        return Row(kind, str(num_ranks), "0", "-", "-", verdict, "-", "-", seconds)
    found = json.loads(result.read_text())
    (trial,) = found["trials"]
    runs = [kept / name for name in ("reference", "killed")]
    expected, ledger = (ledgers(run) for run in runs)
    is_whole = expected == ledger and has_each_sample(expected)
    return Row(
        kind,
        str(num_ranks),
        str(sum(launch["was_killed"] for launch in trial["launches"])),
        str(len(trial["verdict"]["resumes"]) if trial["verdict"] else 0),
        str(found["num_steps"]),
        trial["outcome"],
        "equal" if is_whole else "DIFFERENT",
        " beside ".join(map(size_of, reversed(runs))),
        seconds,
    )


def ledgers(run: Path) -> dict[str, Ledger]:
    """The ledger of each rank; of a step that was trained twice, the last execution."""
    found = {}
    for path in (run / "files").glob("ledger-*.txt"):
        lines = (line.split(": ") for line in path.read_text().splitlines())
        found[path.name] = {int(step): samples for step, samples in lines}
    return found


def has_each_sample(of_ranks: dict[str, Ledger]) -> bool:
    """Whether each sample is there once an epoch; several ranks repeat some."""
    steps = [samples.split() for ledger in of_ranks.values() for samples in ledger.values()]
    counts = Counter(chain.from_iterable(steps))
    most = EPOCHS * (len(counts) + len(of_ranks) - 1)
    return min(counts.values()) >= EPOCHS and counts.total() <= most


def size_of(run: Path) -> str:
    """Of the run directory; its journal has a file for each launch."""
    files = [path for path in (run / "runs").rglob("*") if path.is_file()]
    sizes = [path.stat().st_size for path in files if "journal" not in path.parts]
    return f"{len(sizes)} files, {sum(sizes) / 1e3:.1f} kB"


def main() -> None:
    """Adds a row to the record of the day for each kind that it has not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    parser.add_argument("--kills", type=int, default=60, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="keeps what the runs wrote")
    arguments = parser.parse_args()
    record = RESULTS / f"{datetime.date.today()}-soak.md"
    exact = [row for row in rows_of(record) if row.is_exact]
    done = {row.kind for row in exact if int(row.kills) >= arguments.kills}
    if not record.exists():
        header = Row(*Row._fields), Row(*["---"] * len(Row._fields))
        record.write_text(TITLE + "".join(f"{row}\n" for row in header))
    with tempfile.TemporaryDirectory() as temporary:
        for kind in [each for each in arguments.kinds or KINDS if each not in done]:
            kept = (arguments.keep or Path(temporary)) / kind
            row = soak(kind, arguments.kills, arguments.seed, kept)
            with record.open("a") as file:
                file.write(f"{row}\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
