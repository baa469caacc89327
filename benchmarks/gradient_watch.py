"""What does it cost to know whether gradients outlive their step? Per step, and bytes per save.

The same small training loop with and without the watch, by turns, for models of some numbers of
parameters; then the size of a checkpoint of a loop that clears its gradients and of one that never
does.

    python benchmarks/gradient_watch.py [--rounds 200] [--record]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch
from measuring import Findings, bytes_of, parser_for, silenced
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.capture.gradient_watch import GradientWatch

NUM_PARAMETERS = (10, 100, 1000)
NUM_BYTES_STEPS = 6
HEADINGS = ("parameters", "loop", "µs a step", "bytes of a checkpoint")
LOOPS = {"zero_grad()": True, "zero_grad(set_to_none=False)": False, "never cleared": None}


def model_of(num_parameters: int) -> nn.Module:
    """Layers with two parameters each."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_parameters // 2)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, clears: bool | None) -> None:
    """One optimizer step; ``clears`` is ``set_to_none``, None for a loop that never clears."""
    if clears is not None:
        optimizer.zero_grad(set_to_none=clears)
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()


def microseconds(num_parameters: int, clears: bool | None, rounds: int) -> float:
    """The median of what a boundary takes, after the first steps; with the hook where there is one.

    The hook's own time is part of the backward pass: it is measured by itself and added.
    """
    model = model_of(num_parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    watch = GradientWatch(lambda: list(model.parameters()))
    took = []
    for _ in range(rounds):
        train_step(model, optimizer, clears)
        began = time.perf_counter()
        watch.observe()
        if watch._probe is not None:
            watch._probe(torch.empty(0))
            watch._probe.was_called = False
        took.append(time.perf_counter() - began)
    return statistics.median(took[10:]) * 1e6


def num_bytes(num_parameters: int, clears: bool | None) -> int:
    """The files of the newest checkpoint."""
    model = model_of(num_parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(TensorDataset(torch.ones(NUM_BYTES_STEPS, 8)), batch_size=1)
    with tempfile.TemporaryDirectory() as directory, silenced():
        with Checkpointer(directory, model=model, optimizer=optimizer, save_every=3) as run:
            for _ in run.batches(loader, epochs=1):
                train_step(model, optimizer, clears)
                run.step()
        newest = max(Path(directory).glob("step-*"), key=lambda path: path.name)
        return bytes_of(newest)


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=200)
    arguments = parser.parse_args()
    rows = [
        (
            str(number),
            loop,
            f"{microseconds(number, clears, arguments.rounds):.1f}",
            f"{num_bytes(number, clears):,}",
        )
        for number in NUM_PARAMETERS
        for loop, clears in LOOPS.items()
    ]
    Findings(
        "gradient-watch",
        heading="What it costs to know whether gradients outlive their step",
        before=[
            "`python benchmarks/gradient_watch.py --record`: the time of a step boundary and,",
            "where it stays, of the hook; medians after the first ten steps. The checkpoint of",
            "AdamW at step 6.",
        ],
        title=f"the watch of gradients, {arguments.rounds} steps",
        headings=HEADINGS,
        rows=rows,
        packages=("torch",),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
