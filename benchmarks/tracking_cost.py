"""What does a step cost that is tracked and not saved? Interleaved rounds of the same loop.

    python benchmarks/tracking_cost.py

Prints the median time of one iteration over a stock loader, of the same iteration through a
Checkpointer, and the difference in microseconds.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer

NUM_BATCHES = 2000
ROUNDS = 7
BATCH_SIZES = (1, 32, 512)


def make_loader(batch_size: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """A loader that does as little as a loader can."""
    return DataLoader(
        TensorDataset(torch.zeros(NUM_BATCHES * batch_size, 1)),
        batch_sampler=[
            list(range(start, start + batch_size))
            for start in range(0, NUM_BATCHES * batch_size, batch_size)
        ],
        collate_fn=len,  # the loader's own work is not what is measured
    )


def stock_seconds(batch_size: int) -> float:
    """Seconds of one iteration over the loader."""
    loader = make_loader(batch_size)
    started = time.perf_counter()
    for _ in loader:
        pass
    return (time.perf_counter() - started) / NUM_BATCHES


def tracked_seconds(batch_size: int) -> float:
    """Seconds of one iteration through a Checkpointer, and its ``step()``."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = make_loader(batch_size)
    with (
        tempfile.TemporaryDirectory() as directory,
        Checkpointer(directory, model=model, optimizer=optimizer, save_every=10**9) as run,
    ):
        batches = run.batches(loader, epochs=2)
        next(batches)  # opens the directory and tells what will be saved
        run.step()
        started = time.perf_counter()
        for _ in range(NUM_BATCHES - 1):
            next(batches)
            run.step()
        return (time.perf_counter() - started) / (NUM_BATCHES - 1)


def main() -> None:
    """Prints the table."""
    table = Table("samples in a batch", "stock µs", "tracked µs", "difference µs")
    for batch_size in BATCH_SIZES:
        rounds = [(stock_seconds(batch_size), tracked_seconds(batch_size)) for _ in range(ROUNDS)]
        stock = statistics.median(first for first, _ in rounds) * 1e6
        tracked = statistics.median(second for _, second in rounds) * 1e6
        difference = statistics.median(second - first for first, second in rounds) * 1e6
        table.add_row(str(batch_size), f"{stock:.1f}", f"{tracked:.1f}", f"{difference:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
