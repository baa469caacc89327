"""Kills trainings for hours: ``python benchmarks/soak.py [KIND ...]``, or ``nox -s soak``.

Each kind runs under ``resumekit prove``: uninterrupted, and with SIGKILLs at random times, of all
its processes. It saves in the background. The verdict is that of ``prove``: each step, batch and
bit equal. Two more are found without the library: the ledger, which the training itself writes,
and the bytes of the run directory without its journal. A kind and a seed are one part: its row is
recorded as it ends, and what the record of the day has is not run again.

The kinds ``full-prune`` and ``full-skip`` train on a small file system that is really full, again
and again; mounting it needs root. ``elastic`` is described in ``soak_elastic.py``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from soak_elastic import soak_elastic

RESULTS = Path(__file__).with_name("results")
TRAINING = Path(__file__).with_name("soak_training.py")
FULL = ("full-prune", "full-skip")
KINDS = ("torch", "ddp", "trainer", "lightning", "zero", *FULL, "elastic")
RANKS = {"ddp": 2, "zero": 2}
EPOCHS = 12
TITLE = """# Soak: SIGKILL at random times

By `nox -s soak`. All processes of a training are killed at random times, and the same command is
launched again. The verdict is that of `resumekit prove`. Ledger: the training's own list of the
samples of each step, as it was last executed on each rank, beside that of the uninterrupted run.
Directory: the run directory without its journal, beside that of the uninterrupted run. A kind with
another seed has other kills.

full-prune, full-skip: the run directory of the killed run is on a tmpfs of 1 MiB that is full again
and again, because no checkpoint is deleted without need, or because another file takes the room at
random times. elastic: each relaunch has another number of ranks, and the verdict is that of the
weights at the end.

"""
# What a launch logs of a save for which there was no room, before it or while it was written.
NO_ROOM = re.compile(
    r"was deleted: the disk is full|"
    r"the save at step \d+ failed, training continues: .*(?:bytes are free|No space left)"
)
NEVER = "never full"
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
    seed: str = "0"
    notes: str = ""

    def __str__(self) -> str:
        return f"| {' | '.join(self)} |"

    @property
    def is_exact(self) -> bool:
        """Whether nothing was lost."""
        return self.verdict.startswith(("exact", "equal within")) and self.ledger == "equal"


def rows_of(record: Path) -> list[Row]:
    """The rows of a record; none where there is none."""
    lines = record.read_text().splitlines() if record.exists() else []
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    most = len(Row._fields)
    return [
        Row(*cells) for cells in found if most - len(Row._field_defaults) <= len(cells) <= most
    ][2:]


def soak(kind: str, num_kills: int, seed: int, kept: Path) -> Row:
    """The row of one kind; what the runs wrote is left in a directory."""
    if kind == "elastic":
        return soak_ranks(num_kills, seed, kept)
    volume = kept / "killed" / "runs"
    if kind in FULL and not can_mount(kept):
        verdict = "not run: mount is refused here"
        return Row(kind, "1", "0", "-", "-", verdict, "-", "-", "0", str(seed))
    try:
        return soak_proof(kind, num_kills, seed, kept)
    finally:
        if volume.is_mount():
            shutil.copytree(volume, kept / "volume")
            subprocess.run(["umount", "--lazy", str(volume)], check=True)


def can_mount(kept: Path) -> bool:
    """Whether a tmpfs can be mounted."""
    probe = kept.with_suffix(".probe")
    probe.mkdir(parents=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(probe)], check=False)
    if done.returncode == 0:
        subprocess.run(["umount", str(probe)], check=True)
    return done.returncode == 0


def soak_ranks(num_kills: int, seed: int, kept: Path) -> Row:
    """The row of the kind with another number of ranks in each launch."""
    began = time.monotonic()
    found = soak_elastic(num_kills, seed, kept)
    return Row(
        "elastic",
        "2 and 1",
        str(found.num_kills),
        str(found.num_resumes),
        str(found.num_steps),
        found.verdict,
        "equal" if found.has_equal_ledger else "DIFFERENT",
        "-",
        f"{time.monotonic() - began:.0f}",
        str(seed),
        found.notes,
    )


def soak_proof(kind: str, num_kills: int, seed: int, kept: Path) -> Row:
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
        return Row(kind, str(num_ranks), "0", "-", "-", verdict, "-", "-", seconds, str(seed))
    found = json.loads(result.read_text())
    (trial,) = found["trials"]
    runs = [kept / name for name in ("reference", "killed")]
    expected, ledger = (ledgers(run) for run in runs)
    is_whole = expected == ledger and has_each_sample(expected)
    full = times_full(kept / "killed") if kind in FULL else ""
    return Row(
        kind,
        str(num_ranks),
        str(sum(launch["was_killed"] for launch in trial["launches"])),
        str(len(trial["verdict"]["resumes"]) if trial["verdict"] else 0),
        str(found["num_steps"]),
        "NEVER FULL" if full == NEVER else trial["outcome"],
        "equal" if is_whole else "DIFFERENT",
        " beside ".join(map(size_of, reversed(runs))),
        seconds,
        str(seed),
        full,
    )


def times_full(run: Path) -> str:
    """How often the launches reported a save that found no room."""
    found = [NO_ROOM.findall(path.read_text()) for path in sorted((run / "logs").iterdir())]
    num_launches = sum(map(bool, found))
    reports = list(chain.from_iterable(found))
    if not reports:
        return NEVER
    num_written = sum(each.endswith("No space left") for each in reports)
    return (
        f"no room for {len(reports)} saves, in {num_launches} of {len(found)} launches; noticed by "
        f"a write of {num_written}"
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
    done = {(row.kind, row.seed) for row in exact if int(row.kills) >= arguments.kills}
    if not record.exists():
        header = Row(*Row._fields), Row(*["---"] * len(Row._fields))
        record.write_text(TITLE + "".join(f"{row}\n" for row in header))
    with tempfile.TemporaryDirectory() as temporary:
        for kind in arguments.kinds or KINDS:
            if (kind, str(arguments.seed)) in done:
                continue
            kept = (arguments.keep or Path(temporary)) / f"{kind}-{arguments.seed}"
            row = soak(kind, arguments.kills, arguments.seed, kept)
            with record.open("a") as file:
                file.write(f"{row}\n")
            print(row, flush=True)


if __name__ == "__main__":
    main()
