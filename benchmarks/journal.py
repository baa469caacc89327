"""What does the journal cost per step? A stock loop, ours without the journal, and ours.

The three loops are those of ``step_overhead.py``, in one process and by turns of some batches. The
loops of ours give a loss to ``step()``.

    python benchmarks/journal.py [--rounds 3] [--record]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from findings import Findings, machine
from rich.console import Console
from step_overhead import (
    BATCH_SIZES,
    BATCHES_PER_TURN,
    KINDS,
    TURNS_PER_ROUND,
    WARM_UP,
    seconds_per_batch,
    stock_loop,
    tracked_loop,
)

LOADERS = ("shuffle=True", "DistributedSampler", "WeightedRandomSampler", "2 workers")
AIM = 40  # microseconds of CPU time above the stock loop


class Turn(NamedTuple):
    """CPU seconds a batch of each loop, in turns that followed one another."""

    stock: float
    without: float
    journal: float


def measure(name: str, batch_size: int) -> list[Turn]:
    """One round."""
    kind, loss = KINDS[name], torch.tensor(0.5)
    turns = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stock = stock_loop(kind.make(batch_size))
        loops: list[Callable[[], Any]] = [stock]
        for has_journal in (False, True):
            loops.append(
                tracked_loop(
                    kind.make(batch_size), kind.options, stack, loss=loss, journal=has_journal
                )
            )
        for loop in loops:
            seconds_per_batch(loop, WARM_UP)
        for number in range(TURNS_PER_ROUND):
            order = [*range(number % 3, 3), *range(number % 3)]
            took = {which: seconds_per_batch(loops[which], BATCHES_PER_TURN) for which in order}
            turns.append(Turn(*(took[which].cpu for which in range(3))))
    return turns


HEADINGS = ("loader", "batch", "stock µs", "ours µs", "with journal µs", "journal µs", "added µs")


def row_of(name: str, batch_size: int, turns: list[Turn]) -> tuple[str, ...]:
    """Medians of CPU time over the turns, also of the differences."""

    def median(value: Callable[[Turn], float]) -> str:
        return f"{statistics.median(map(value, turns)) * 1e6:.1f}"

    return (
        name,
        str(batch_size),
        median(lambda turn: turn.stock),
        median(lambda turn: turn.without),
        median(lambda turn: turn.journal),
        median(lambda turn: turn.journal - turn.without),
        median(lambda turn: turn.journal - turn.stock),
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds (default 3)")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/")
    arguments = parser.parse_args()
    rows = []
    for name in LOADERS:
        for batch_size in BATCH_SIZES:
            rounds = [measure(name, batch_size) for _ in range(arguments.rounds)]
            rows.append(row_of(name, batch_size, [turn for turns in rounds for turn in turns]))
    found = Findings(
        f"CPU time of a step with the journal, {arguments.rounds} rounds",
        HEADINGS,
        rows,
        machine("torch", "numpy"),
    )
    console = Console()
    found.show(console)
    if arguments.record:
        num_turns = arguments.rounds * TURNS_PER_ROUND
        path = found.record(
            "journal",
            heading="What the journal adds to a step",
            before=[
                "`python benchmarks/journal.py --record`: CPU time of the main process for",
                "the next batch and, in ours, `step(loss=loss)`, without a save. Three loops in",
                f"one process, by turns of {BATCHES_PER_TURN} batches; medians of {num_turns}",
                "turns, also of their differences. Samples are ready and not collated.",
                f"The aim is to add less than {AIM} microseconds to the stock loop.",
            ],
        )
        console.print(f"written to {path}")


if __name__ == "__main__":
    main()
