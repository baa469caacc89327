"""What does a save of a ZeRO engine cost, next to ``engine.save_checkpoint``?

Ranks on the CPU with gloo; an engine of dense layers with AdamW. Every round measures both one
after the other on the same disk, so the ratios hold on a machine whose load changes. Ours is
committed, digested and durable when it returns; DeepSpeed's own is followed by an fsync of every
file that it wrote, so that it is durable too. Neither deletes an older checkpoint meanwhile.

    python benchmarks/deepspeed_save.py [--ranks 2] [--rounds 5] [--record]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import Findings, fsync_all, median_ratio, parser_for

STAGES = (1, 2, 3)
WIDTH, NUM_LAYERS = 2048, 8
HEADINGS = ("ZeRO", "resumekit", "engine.save_checkpoint + fsync", "ratio")


def rank_main(directory: Path, stage: int, num_rounds: int) -> None:
    """One rank: the seconds of each save, of ours and of DeepSpeed's, on rank 0 as JSON."""
    import deepspeed
    import torch
    from torch import distributed, nn

    from resumekit.adapters.deepspeed import Checkpointer

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine: Any = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )[0]
    engine.backward(engine(torch.rand(1, WIDTH)).square().mean())
    engine.step()
    rank = distributed.get_rank()
    native = directory / "native"
    checkpointer = Checkpointer(engine, directory / "ours", keep_latest=num_rounds + 1)
    took: list[list[float]] = []
    for number in range(num_rounds + 1):
        seconds = []
        for is_ours in (True, False):
            distributed.barrier()
            if rank == 0:
                os.sync()
            distributed.barrier()
            begin = time.perf_counter()
            if is_ours:
                checkpointer.save()
            else:
                engine.save_checkpoint(str(native), tag=f"step{number}")
                if rank == 0:
                    fsync_all(native / f"step{number}")
                distributed.barrier()
            seconds.append(time.perf_counter() - begin)
        if rank == 0:
            shutil.rmtree(native)
        if number:  # the first round warms up
            took.append(seconds)
    checkpointer.close()
    if rank == 0:
        (directory / "seconds.json").write_text(json.dumps(took))
    distributed.destroy_process_group()


def measure(stage: int, num_ranks: int, num_rounds: int) -> list[list[float]]:
    """The seconds of each round, ours and DeepSpeed's."""
    with tempfile.TemporaryDirectory(prefix="deepspeed-save-", dir=".") as name:
        directory = Path(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}", __file__, "--rank-of", name]
        command += ["--stage", str(stage), "--rounds", str(num_rounds)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        seconds: list[list[float]] = json.loads((directory / "seconds.json").read_text())
        return seconds


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=5)
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of, arguments.stage, arguments.rounds)
        return
    rows = []
    for stage in STAGES:
        took = measure(stage, arguments.ranks, arguments.rounds)
        columns = list(zip(*took, strict=True))
        medians = [f"{statistics.median(column):.2f} s" for column in columns]
        rows.append((f"stage {stage}", *medians, f"{median_ratio(*columns):.2f}x"))
    megabytes = NUM_LAYERS * (WIDTH * WIDTH + WIDTH) * 12 / 1e6
    title = f"{megabytes:.0f} MB of fp32 weights and moments, {arguments.ranks} ranks"
    Findings(
        "deepspeed-save",
        heading="Saves of a ZeRO engine",
        before=[
            f"`python benchmarks/deepspeed_save.py --record`: {title},",
            f"medians of {arguments.rounds} rounds, ratios too.",
        ],
        title=title,
        headings=HEADINGS,
        rows=rows,
        packages=("torch", "deepspeed"),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
