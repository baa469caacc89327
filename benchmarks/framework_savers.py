"""How long does a save hold training up under each framework, next to the framework's own saver?

GPT-2 124M in float32 with AdamW is trained under the Trainer, Accelerate, Lightning, and DeepSpeed
at stages 1, 2 and 3, there with two of its layers: with all, DeepSpeed's own saver takes seconds.
Each is trained twice, in processes of its own, and saved after every step, in rounds and in a
random order, from the end of the step to the beginning of the next: first by us durable and
digested, and by the framework with an fsync of its files; then by an async save of ours, and by the
framework as it is. The limits of the machine for the same bytes are measured in the same rounds.

    python benchmarks/framework_savers.py [--only lightning ...] [--rounds 7] [--record]

A framework takes about two minutes. With ``--only`` the record is a section of the page of that
day, so that the frameworks can be measured one after the other:

    for name in transformers accelerate lightning deepspeed-1 deepspeed-2 deepspeed-3
    do python benchmarks/framework_savers.py --only $name --record; done
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

from framework_runs import (
    COPY,
    DEEPSPEED,
    DEEPSPEED_LAYERS,
    FLUSHED,
    OURS,
    RUNS,
    STOCK,
    WRITE,
    Task,
    model_of,
)
from judging import HEADINGS, Target, compared, stated
from measuring import Findings, MachineLoad, parser_for
from workload import Training

from resumekit.launcher.processes import Launch

BELOW = Target(1.0, is_strict=True)
NUM_RANKS = 2  # under DeepSpeed
TIMEOUT_SECONDS = 500  # of the processes of one framework


def measure(name: str, task: Task) -> dict[str, Any]:
    """What the processes of a framework found.

    Raises:
        SystemExit: they failed, with what they wrote to stderr, or took too long.
    """
    arguments = ["--child", name, "--directory", str(task.directory)]
    arguments += ["--rounds", str(task.num_rounds), "--state-bytes", str(task.state_bytes)]
    arguments += ["--async"] * task.is_async + ["--tiny"] * task.is_tiny
    launcher = []
    if name.startswith(DEEPSPEED):
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    task.directory.mkdir()
    command = [sys.executable, *launcher, __file__, *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    with Launch(command, environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as started:
        try:
            _, errors = started.communicate(timeout=TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            # torch 2.13 utils/cpp_extension.py _jit_compile: FileBaton waits without end.
            raise SystemExit(
                f"{name} took longer than {TIMEOUT_SECONDS} s. DeepSpeed waits for a file `lock` "
                "below ~/.cache/torch_extensions: remove one that a killed process has left"
            ) from None
        finally:
            started.kill_all()
    if started.returncode:
        raise SystemExit(errors[-4000:].decode(errors="replace"))
    found: dict[str, Any] = json.loads((task.directory / "found.json").read_text())
    return found


def rows_of(name: str, found: dict[str, Any], found_async: dict[str, Any]) -> list[Any]:
    """The limits, then ours beside the framework's."""
    durable, sizes, blocked = found["seconds"], found["bytes"], found_async["seconds"]
    ours = f"save, {sizes[OURS] / 1e9:.2f} GB"
    flushed = f"{FLUSHED}, {sizes[FLUSHED] / 1e9:.2f} GB"
    rows = [
        stated(WRITE, durable[WRITE]),
        stated(COPY, blocked[COPY]),
        compared(flushed, durable[FLUSHED], WRITE, durable[WRITE], None),
        compared(ours, durable[OURS], WRITE, durable[WRITE], None),
        compared(ours, durable[OURS], FLUSHED, durable[FLUSHED], BELOW),
        compared(STOCK, blocked[STOCK], COPY, blocked[COPY], None),
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
    rows, sizes = [], {}
    for framework in given.only or RUNS:
        state_bytes = Training.of(model_of(framework, tiny=given.tiny)).num_bytes()
        sizes[framework] = f"{state_bytes / 1e9:.2f} GB"
        found = []
        for is_async in (False, True):
            with tempfile.TemporaryDirectory(dir=given.directory or ".") as name:
                directory = Path(name, "child").absolute()
                task = Task(directory, given.rounds, is_async, given.tiny, state_bytes)
                found.append(measure(framework, task))
        rows += rows_of(framework, *found)
    Findings(
        "framework-savers",
        heading="Saves under each framework",
        before=[
            "`python benchmarks/framework_savers.py --record`: GPT-2 124M in float32 with AdamW;",
            f"under DeepSpeed {DEEPSPEED_LAYERS} of its 12 layers, on {NUM_RANKS} ranks with gloo.",
            f"Training state: {', '.join(f'{name} {size}' for name, size in sizes.items())}.",
            "Each round in random order; a ratio is the median of the rounds' ratios, its",
            "interval a bootstrap's over the rounds. From the end of a step to the beginning of",
            "the next; neither deletes an old checkpoint meanwhile. The sizes are those of one",
            "checkpoint; ratios are of times, not of times per byte. Raw rows are for the bytes",
            "of the training state. Durable saves and the write are measured in one process, async",
            "saves, the framework's own and the copy in another one.",
        ],
        title=f"GPT-2 with AdamW, {given.rounds} rounds",
        headings=("framework", *HEADINGS[:-1]),
        rows=rows,
        packages=("torch", "transformers", "accelerate", "lightning", "deepspeed"),
        load=load,
        part=f"{', '.join(given.only)}, {given.rounds} rounds" if given.only else "",
    ).publish(given.record)


if __name__ == "__main__":
    main()
