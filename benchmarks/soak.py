"""Kills trainings for hours: ``python benchmarks/soak.py [KIND ...]``.

Each kind runs under ``resumekit prove``: uninterrupted, and with SIGKILLs at random times, of all
its processes. It saves in the background. The verdict is that of ``prove``: each step, batch and
bit equal. A kind is one part: its row is recorded as it ends.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RESULTS = Path(__file__).with_name("results")
TRAINING = Path(__file__).with_name("soak_training.py")
KINDS = ("torch", "ddp", "trainer", "lightning", "zero")
RANKS = {"ddp": 2, "zero": 2}
HEADER = "| kind | ranks | kills | verdict | seconds |"


def soak(kind: str, num_kills: int, seed: int) -> str:
    """The row of one kind."""
    began = time.monotonic()
    num_ranks = RANKS.get(kind, 1)
    with tempfile.TemporaryDirectory() as temporary:
        result = Path(temporary, "result.json")
        command = [
            *(sys.executable, "-m", "resumekit.cli", "prove", f"--kills={num_kills}"),
            *(f"--seed={seed}", f"--json={result}", f"--world={num_ranks}"),
            *("--", "python", str(TRAINING), kind, "{dir}"),
        ]
        status = subprocess.run(command, check=False).returncode
        is_exact = result.exists() and json.loads(result.read_text())["ok"]
        verdict = "exact" if is_exact else "DIFFERENT" if result.exists() else "no result"
    seconds = int(time.monotonic() - began)
    cells = (kind, num_ranks, num_kills, f"{verdict}, exit code {status}", seconds)
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Adds one row to the record of the day for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    parser.add_argument("--kills", type=int, default=60, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    record = RESULTS / f"{datetime.date.today()}-soak.md"
    if not record.exists():
        rule = "|".join("---" for _ in HEADER.split("|")[1:-1])
        record.write_text(f"# Soak: kills at random times\n\n{HEADER}\n|{rule}|\n")
    for kind in arguments.kinds or KINDS:
        row = soak(kind, arguments.kills, arguments.seed)
        with record.open("a") as file:
            file.write(f"{row}\n")
        print(row, flush=True)


if __name__ == "__main__":
    main()
