"""How long does a save hold training up under each framework, next to the framework's own saver?

GPT-2 124M in float32 with AdamW is trained under the Trainer, Accelerate, Lightning, and DeepSpeed
at stages 1, 2 and 3, each in processes of its own. After every step it is saved in rounds, in a
random order, by us, by the framework, and by the framework with an fsync of its files; each time
from the end of a step to the beginning of the next. Ours is durable and digested then, or is an
async save, which is compared with the framework's saver as it is. The limits of the machine for
the same bytes are measured in the same rounds.

    python benchmarks/framework_savers.py [--only lightning ...] [--rounds 7] [--record]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from framework_runs import COPY, FLUSHED, OURS, RUNS, STOCK, WRITE, Task
from judging import HEADINGS, Target, compared, stated
from measuring import Findings, MachineLoad, parser_for
from workload import HAS_ASYNC_SAVES, Training, gpt2

BELOW = Target(1.0, is_strict=True)
NUM_RANKS = 2  # under DeepSpeed


def measure(name: str, task: Task) -> dict[str, Any]:
    """What the processes of a framework found.

    Raises:
        SystemExit: they failed; with what they wrote to stderr.
    """
    arguments = ["--child", name, "--directory", str(task.directory)]
    arguments += ["--rounds", str(task.num_rounds), "--state-bytes", str(task.state_bytes)]
    arguments += ["--async"] * task.is_async + ["--tiny"] * task.is_tiny
    launcher = []
    if name.startswith("deepspeed"):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    task.directory.mkdir()
    command = [sys.executable, *launcher, __file__, *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, Any] = json.loads((task.directory / "found.json").read_text())
    return found


def rows_of(name: str, found: dict[str, Any], found_async: dict[str, Any] | None) -> list[Any]:
    """The limits, then ours beside the framework's."""
    seconds, sizes = found["seconds"], found["bytes"]
    nothing: dict[str, list[float]] = {OURS: [], STOCK: seconds[STOCK], COPY: seconds[COPY]}
    blocked = nothing if found_async is None else found_async["seconds"]
    ours = f"save, {sizes[OURS] / 1e9:.2f} GB"
    stock = f"{STOCK}, {sizes[STOCK] / 1e9:.2f} GB"
    rows = [
        stated(WRITE, seconds[WRITE]),
        stated(COPY, seconds[COPY]),
        compared(stock, seconds[STOCK], WRITE, seconds[WRITE], None),
        compared(f"{STOCK} + fsync", seconds[FLUSHED], WRITE, seconds[WRITE], None),
        compared(ours, seconds[OURS], WRITE, seconds[WRITE], None),
        compared(ours, seconds[OURS], FLUSHED, seconds[FLUSHED], BELOW),
        compared("blocked by an async save", blocked[OURS], COPY, blocked[COPY], None),
        compared("blocked by an async save", blocked[OURS], STOCK, blocked[STOCK], BELOW),
    ]
    return [(name, *row[:-1]) for row in rows]


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=7, has_tiny=True)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), help="these frameworks")
    parser.add_argument("--directory", type=Path, help="where to write (default: here)")
    parser.add_argument("--child", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--state-bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--async", action="store_true", dest="is_async", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        task = Task(given.directory, given.rounds, given.is_async, given.tiny, given.state_bytes)
        RUNS[given.child](task)
        return
    load = MachineLoad()
    state_bytes = Training.of(gpt2(tiny=given.tiny)).num_bytes()
    rows = []
    for framework in given.only or RUNS:
        found = []
        for is_async in (False, True)[: 1 + HAS_ASYNC_SAVES]:
            with tempfile.TemporaryDirectory(dir=given.directory or ".") as name:
                directory = Path(name, "child").absolute()
                task = Task(directory, given.rounds, is_async, given.tiny, state_bytes)
                found.append(measure(framework, task))
        rows += rows_of(framework, found[0], found[1] if len(found) > 1 else None)
    Findings(
        "framework-savers",
        heading="Saves under each framework",
        before=[
            "`python benchmarks/framework_savers.py --record`: GPT-2 124M in float32 with AdamW,",
            f"{state_bytes / 1e9:.2f} GB of training state; under DeepSpeed {NUM_RANKS} ranks with",
            f"gloo. {given.rounds} rounds, each in random order; a ratio is the median of the",
            "rounds' ratios, its interval a bootstrap's over the rounds. From the end of a step",
            "to the beginning of the next one; neither deletes an old checkpoint meanwhile. The",
            "sizes are those of one checkpoint; ratios are of times, not of times per byte. The",
            "raw rows are for the bytes of the training state. Async saves are measured in",
            "processes of their own, in rounds with the same contenders.",
        ],
        title=f"GPT-2 124M with AdamW, {state_bytes / 1e9:.2f} GB, {given.rounds} rounds",
        headings=("framework", *HEADINGS[:-1]),
        rows=rows,
        packages=("torch", "transformers", "accelerate", "lightning", "deepspeed"),
        load=load,
    ).publish(given.record)


if __name__ == "__main__":
    main()
