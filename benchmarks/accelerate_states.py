"""What a save and a resume take beside Accelerate's own, and for how long training stands still.

A stack of linear layers in float32 with AdamW's state, in the middle of an epoch of a shuffled map
dataset. Every round measures all contenders one after the other on the same disk, so the ratios
hold on a machine whose load changes. What is compared:

* save: from the end of a step to the next batch in hand, with a checkpoint between, against
  ``accelerator.save_state``. Ours is on the disk then, under digests; what ``save_state`` wrote is
  in the page cache, and a second line has it flushed as well. Training stands still all that time;
* resume: a fresh process, a cold page cache, from the prepared objects to the next batch: ours with
  every byte verified, against ``load_state`` and ``skip_first_batches``.

    python benchmarks/accelerate_states.py [--rounds 5] [--layers 12] [--directory DIR] [--record]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from measuring import (
    Findings,
    drop_page_cache,
    fsync_all,
    median_ratio,
    parser_for,
    run_child,
    timed,
)
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.accelerate import Checkpointer

WIDTH = 2048
NUM_SAMPLES, BATCH_SIZE = 1_000_000, 32
NUM_USED = 3  # the steps before each save
OURS, THEIRS, FLUSHED = "resumekit", "save_state", "save_state and fsync"


class Run:
    """All that a script has prepared."""

    def __init__(self, num_layers: int) -> None:
        set_seed(0)
        self.accelerator: Any = Accelerator(cpu=True)
        layers = (nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        model = nn.Sequential(nn.Embedding(16, WIDTH), *layers)
        samples = TensorDataset(torch.arange(NUM_SAMPLES) % 16)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True),
        )

    def train(self, batches: Iterator[Any], num_steps: int) -> None:
        """Some steps."""
        for (indices,) in islice(batches, num_steps):
            self.accelerator.backward(self.model(indices).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()


def save_child(name: str, directory: Path, num_layers: int) -> float:
    """Seconds for which a save holds training up."""
    run = Run(num_layers)
    seconds = 0.0
    if name == OURS:
        checkpointer = Checkpointer(run.accelerator, directory)
        batches = checkpointer.batches(run.loader, epochs=1)
        for _ in range(2):  # the second one is measured: a run makes many
            run.train(batches, NUM_USED)
            os.sync()
            checkpointer.save()
            seconds, _ = timed(lambda: next(batches))
        checkpointer.__exit__(KeyboardInterrupt, None, None)  # leaves without a second save
        return seconds
    batches = iter(run.loader)

    def save() -> None:
        run.accelerator.save_state(str(directory))
        if name == FLUSHED:
            fsync_all(directory)
        next(batches)

    for _ in range(2):
        run.train(batches, NUM_USED)
        if directory.exists():  # ours keeps the checkpoint before, too, and writes to other blocks
            directory.rename(directory.with_name(f"{directory.name}-before"))
        os.sync()
        seconds, _ = timed(save)
    return seconds


def resume_child(name: str, directory: Path, num_layers: int) -> float:
    """Seconds from the prepared objects to the next batch."""
    run = Run(num_layers)

    def resume_ours() -> None:
        checkpointer = Checkpointer(run.accelerator, directory)
        next(checkpointer.batches(run.loader, epochs=1))
        checkpointer.__exit__(KeyboardInterrupt, None, None)

    def resume_theirs() -> None:
        run.accelerator.load_state(str(directory))
        next(iter(run.accelerator.skip_first_batches(run.loader, 2 * NUM_USED)))

    return timed(resume_ours if name == OURS else resume_theirs)[0]


Seconds = dict[str, dict[str, list[float]]]


def measure(directory: Path, num_rounds: int, num_layers: int, console: Console) -> Seconds:
    """All contenders, interleaved; who comes first changes from round to round."""
    contenders = (OURS, THEIRS, FLUSHED)
    seconds: Seconds = {what: {name: [] for name in contenders} for what in ("save", "resume")}
    for number in range(num_rounds + 1):  # the first round warms up
        for name in contenders[:: 1 if number % 2 else -1]:
            path = directory / name.replace(" ", "-") / "saved"
            path.parent.mkdir()
            options = ("--directory", str(path), "--layers", str(num_layers))
            save = run_child(__file__, "--child", "save", name, *options)
            drop_page_cache(path)
            resume = run_child(__file__, "--child", "resume", name, *options)
            shutil.rmtree(path.parent)
            if number:
                seconds["save"][name].append(save)
                seconds["resume"][name].append(resume)
                console.print(f"round {number}: {name} {save:.2f} {resume:.2f}", style="dim")
    del seconds["resume"][FLUSHED]
    return seconds


def rows_of(seconds: Seconds) -> list[tuple[str, str, str, str]]:
    """What was measured, whose, the median, and how long ours took for one second of it."""
    rows = []
    for what, times in seconds.items():
        for name, theirs in times.items():
            ratio = "" if name == OURS else f"{median_ratio(times[OURS], theirs):.2f}x"
            shown = name if what == "save" or name == OURS else "load_state, skip_first_batches"
            rows.append((what, shown, f"{statistics.median(theirs):.2f}", ratio))
    return rows


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=5)
    parser.add_argument("--layers", type=int, default=12, help="of 4.2 million parameters each")
    parser.add_argument("--directory", type=Path, help="where to write (default: here)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, name = arguments.child
        child = save_child if what == "save" else resume_child
        print(json.dumps(child(name, arguments.directory, arguments.layers)))
        return
    console = Console()
    with tempfile.TemporaryDirectory(prefix="accelerate-", dir=arguments.directory or ".") as name:
        seconds = measure(Path(name), arguments.rounds, arguments.layers, console)
    num_bytes = (arguments.layers * (WIDTH + 1) * WIDTH + 16 * WIDTH) * 4 * 3
    size = f"{num_bytes / 1e9:.2f} GB"
    Findings(
        "accelerate",
        heading="Saving and resuming beside Accelerate's own",
        before=[
            "`python benchmarks/accelerate_states.py --record`: float32 linear layers with",
            f"AdamW, {size}, in the middle of an epoch over a shuffled map dataset. Medians of",
            f"{arguments.rounds} interleaved rounds; a ratio is the median of the rounds'",
            "ratios. Ours is durable, under digests and verified; `save_state` is neither, and",
            "flushes nothing.",
        ],
        title=f"Linear layers with AdamW, {size}, {arguments.rounds} rounds",
        headings=("", "", "seconds", "ours for one of theirs"),
        rows=rows_of(seconds),
        packages=("torch", "numpy", "accelerate"),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
