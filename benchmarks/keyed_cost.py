"""What do keys cost a batch of 32 without workers? Interleaved rounds of the same loop.

    python benchmarks/keyed_cost.py

Prints, for samples that cost nothing and for samples that are augmented, the median time of a batch
from a stock loader, through a Checkpointer with ``randomness="tape"`` and with ``"keyed"``. A ratio
is the median of the rounds' ratios to the stock loader. With workers the same work is theirs.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from measuring import Findings, parser_for
from step_overhead import tiny_run
from torch.utils.data import DataLoader, Dataset

BATCH_SIZE = 32
NUM_BATCHES = 300
MODES = ("stock", "tape", "keyed")


class Nothing(Dataset[torch.Tensor]):
    """Samples that are ready, and draw nothing: all that is measured is overhead."""

    def __init__(self) -> None:
        self.sample = torch.zeros(1)

    def __len__(self) -> int:
        return NUM_BATCHES * BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


class Augmented(Nothing):
    """Small images, flipped, scaled and with noise: the least that is done to images."""

    def __init__(self) -> None:
        self.sample = torch.zeros(3, 32, 32)

    def __getitem__(self, index: int) -> torch.Tensor:
        image = self.sample.flip(2) if random.random() < 0.5 else self.sample
        image = image * (0.9 + 0.2 * float(np.random.rand()))
        return image + 0.01 * torch.randn(image.shape)


class Large(Augmented):
    """The same at the size of photographs."""

    def __init__(self) -> None:
        self.sample = torch.zeros(3, 224, 224)


DATASETS: dict[str, tuple[Callable[[], Dataset[Any]], int]] = {
    "ready-made": (Nothing, NUM_BATCHES),
    "3x32x32, augmented": (Augmented, NUM_BATCHES),
    "3x224x224, augmented": (Large, 12),
}


def seconds_per_batch(data: Dataset[Any], mode: str, num_batches: int) -> float:
    """Seconds that the loop waits for one batch."""
    loader = DataLoader(data, BATCH_SIZE, shuffle=True)
    with contextlib.ExitStack() as stack:
        batches: Iterator[Any]
        if mode == "stock":
            batches = iter(loader)
            step = _nothing
        else:
            run = stack.enter_context(tiny_run(randomness=mode))
            batches = iter(run.batches(loader, epochs=2))
            step = run.step
        next(batches)
        step()
        started = time.perf_counter()
        for _ in range(num_batches - 1):
            next(batches)
            step()
        return (time.perf_counter() - started) / (num_batches - 1)


def _nothing() -> None:
    """A stock loop marks no steps."""


def main() -> None:
    """Measures and prints."""
    arguments = parser_for(__doc__, rounds=9).parse_args()
    rows = []
    for name, (make, num_batches) in DATASETS.items():
        data = make()
        rounds = [
            [seconds_per_batch(data, mode, num_batches) for mode in MODES]
            for _ in range(arguments.rounds)
        ]
        medians = [statistics.median(column) * 1e6 for column in zip(*rounds, strict=True)]
        ratios = [statistics.median(each[i] / each[0] for each in rounds) for i in (1, 2)]
        shown = (*(f"{median:.0f}" for median in medians), *(f"{ratio:.2f}x" for ratio in ratios))
        rows.append((name, *shown))
    Findings(
        "keyed-cost",
        heading="What keyed randomness costs",
        before=[
            "`python benchmarks/keyed_cost.py --record`: the wait for a batch from a stock loader,",
            'through a Checkpointer with `randomness="tape"` and with `"keyed"`, without workers.',
            f"Medians of {arguments.rounds} rounds, also of their ratios.",
        ],
        title=f"a batch of {BATCH_SIZE} samples, {arguments.rounds} rounds",
        headings=("samples", *(f"{mode} µs" for mode in MODES), "tape / stock", "keyed / stock"),
        rows=rows,
        packages=("torch", "numpy"),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
