"""How long does it take to find the middle of an epoch again, and what is read on the way?

Each contender really goes through half an epoch of a shuffled loader, in one process. In a fresh
one a new loader is sent to that position, and the time until it delivers the next batch is taken:

* ours with ``ResumableSampler``, whose order has random access;
* ours with a stock ``shuffle=True``, which draws its permutation once more;
* accelerate's ``skip_first_batches``, which is also what the Hugging Face Trainer calls;
* torchdata's ``StatefulDataLoader``, with its own state;
* for scale: drawing a stock RandomSampler's permutation once.

    python benchmarks/seek.py [--lengths 1000000 ...] [--rounds 3] [--record]

A tool that is not installed is reported and left out. At 100 million samples a stock permutation
takes about 5 GB of memory while it is drawn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from measuring import Findings, median_ratio, parser_for, run_child, timed, version_of
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

from resumekit.data import ResumableSampler
from resumekit.data.position import DataPosition

LENGTHS = (1_000_000, 10_000_000, 100_000_000)
BATCH_SIZE = 256


class Counting(Dataset[int]):
    """As cheap as a dataset can be; it counts the samples that are read."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.num_reads = 0

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> list[int]:
        """All samples of a batch at once."""
        self.num_reads += len(indices)
        return indices

    def __getitem__(self, index: int) -> int:
        return self.__getitems__([index])[0]


def generator() -> torch.Generator:
    """The same permutation for every stock contender."""
    return torch.Generator().manual_seed(0)


def settings(length: int) -> dict[str, Any]:
    """A loader's arguments, without its order."""
    return {"dataset": Counting(length), "batch_size": BATCH_SIZE, "collate_fn": list}


def make_resumable(length: int) -> DataLoader[Any]:
    """A loader whose order has random access."""
    arguments = settings(length)
    return DataLoader(**arguments, sampler=ResumableSampler(arguments["dataset"]))


def make_stock(length: int) -> DataLoader[Any]:
    """A stock loader."""
    return DataLoader(**settings(length), shuffle=True, generator=generator())


def make_torchdata(length: int) -> Any:
    """The loader of torchdata."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(**settings(length), shuffle=True, generator=generator())


def position_of_ours(make: Callable[[int], DataLoader[Any]], length: int, num_batches: int) -> Any:
    """What a Checkpointer saves in the middle of the epoch."""
    position = DataPosition()
    source = position.open(make(length), "train")
    source.begin(0)
    for _ in range(num_batches):
        source.next_batch()
    return position.state_dict()


def seek_ours(loader: Any, saved: Any) -> list[int]:
    """What a Checkpointer's loop does on a resume."""
    position = DataPosition()
    position.load_state_dict(saved)
    source = position.open(loader, "train")
    source.begin(0)
    batch: list[int] = source.next_batch()
    return batch


def seek_accelerate(loader: Any, position: int) -> list[int]:
    """As a script does that counts its batches; it must bring the permutation back by itself."""
    from accelerate import skip_first_batches

    batch: list[int] = next(iter(skip_first_batches(loader, position)))
    return batch


def position_of_torchdata(length: int, num_batches: int) -> Any:
    """The loader's own state in the middle of the epoch."""
    loader = make_torchdata(length)
    batches = iter(loader)
    for _ in range(num_batches):
        next(batches)
    return loader.state_dict()


def seek_torchdata(loader: Any, position: Any) -> list[int]:
    """By the loader's own state."""
    loader.load_state_dict(position)
    batch: list[int] = next(iter(loader))
    return batch


def draw_once(loader: Any, position: Any) -> list[int]:
    """What any stock shuffled epoch costs before its first sample."""
    next(iter(loader.sampler))
    return []


def number_of(length: int, num_batches: int) -> int:
    """The position as a number of batches."""
    return num_batches


@dataclass(frozen=True)
class Contender:
    """A way to find the middle of an epoch.

    Args:
        make: a fresh loader.
        position: what is known of the position, from iterating to it.
        seek: the next batch, in a process that has a fresh loader and knows the position.
    """

    make: Callable[[int], Any]
    position: Callable[[int, int], Any]
    seek: Callable[[Any, Any], list[int]]


def ours(make: Callable[[int], DataLoader[Any]]) -> Contender:
    """Through the core."""
    return Contender(make, partial(position_of_ours, make), seek_ours)


OURS, STOCK = "ours, ResumableSampler", "ours, shuffle=True"
ACCELERATE = "accelerate, Trainer: skip_first_batches"
TORCHDATA = "torchdata StatefulDataLoader"
SCALE = "a stock permutation, drawn once"

CONTENDERS = {
    OURS: ours(make_resumable),
    STOCK: ours(make_stock),
    ACCELERATE: Contender(make_stock, number_of, seek_accelerate),
    TORCHDATA: Contender(make_torchdata, position_of_torchdata, seek_torchdata),
    SCALE: Contender(make_stock, number_of, draw_once),
}
NEEDS = {ACCELERATE: "accelerate", TORCHDATA: "torchdata"}


def middle(length: int) -> int:
    """The batches of half an epoch."""
    return length // BATCH_SIZE // 2


def prepare(name: str, length: int, path: Path) -> None:
    """Goes to the middle of an epoch and stores the position, in another process."""
    torch.save(CONTENDERS[name].position(length, middle(length)), path)


def seek(name: str, length: int, path: Path) -> dict[str, Any]:
    """Seconds, samples read and the next batch; in a process of its own."""
    contender = CONTENDERS[name]
    position = torch.load(path, weights_only=False)  # written by us a moment ago
    loader = contender.make(length)
    if name in NEEDS:
        import_module(NEEDS[name])
    seconds, batch = timed(lambda: contender.seek(loader, position))
    return {
        "seconds": seconds,
        "num_reads": loader.dataset.num_reads - len(batch),
        "batch": batch,
    }


def child(what: str, name: str, length: int, path: Path) -> Any:
    """What a fresh process prepares or measures."""
    # torchdata 0.11 calls something that torch 2.13 has deprecated.
    options = ("-W", "ignore::UserWarning")
    arguments = ("--child", what, name, str(path), "--lengths", str(length))
    return run_child(__file__, *arguments, options=options)


Results = dict[int, dict[str, list[dict[str, Any]]]]


def measure(
    names: Sequence[str], lengths: Sequence[int], num_rounds: int, console: Console
) -> Results:
    """Every contender at every length, interleaved."""
    results: Results = {}
    with tempfile.TemporaryDirectory(prefix="seek-") as directory:
        paths = {name: Path(directory) / f"{number}.pt" for number, name in enumerate(names)}
        for length in lengths:
            results[length] = {name: [] for name in names}
            for name in names:
                child("prepare", name, length, paths[name])
            for number in range(num_rounds):
                for name in names if number % 2 else reversed(names):
                    result = child("seek", name, length, paths[name])
                    results[length][name].append(result)
                    seconds, num_reads = result["seconds"], result["num_reads"]
                    line = f"{length:,} {name}: {seconds:.4f} s, {num_reads} read"
                    console.print(line, style="dim")
            if length == min(lengths):
                _require_right(results[length], length)
    return results


def _require_right(results: Mapping[str, list[dict[str, Any]]], length: int) -> None:
    """At the shortest length, that each contender gave the batch of an uninterrupted epoch."""
    for name in results.keys() - {SCALE}:
        right = next(islice(CONTENDERS[name].make(length), middle(length), None))
        if any(each["batch"] != right for each in results[name]):
            raise AssertionError(f"{name} came to another position")


HEADINGS = ("samples", "", "seconds", "read", "of drawing once", "of ours")


def rows_of(results: Results) -> list[tuple[str, ...]]:
    """Medians, and the medians of the ratios round by round."""
    rows: list[tuple[str, ...]] = []
    for length, by_name in results.items():
        seconds = {name: [each["seconds"] for each in got] for name, got in by_name.items()}
        for name, times in seconds.items():
            ratios = [median_ratio(times, seconds[other]) for other in (SCALE, OURS)]
            num_reads = max(each["num_reads"] for each in by_name[name])
            median = statistics.median(times)
            rows.append(
                (
                    f"{length:,}",
                    name,
                    f"{median:.4f}" if median < 0.1 else f"{median:.2f}",
                    str(num_reads) if name != SCALE else "",
                    f"{ratios[0]:.4f}x" if ratios[0] < 0.1 else f"{ratios[0]:.2f}x",
                    f"{ratios[1]:,.0f}x",
                )
            )
    return rows


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS), help="samples")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        what, name, path = arguments.child
        function = prepare if what == "prepare" else seek
        print(json.dumps(function(name, arguments.lengths[0], Path(path))))
        return
    console = Console()
    names = [name for name in CONTENDERS if version_of(NEEDS.get(name, "torch"))]
    for name in CONTENDERS.keys() - set(names):
        console.print(f"{name} is left out: {NEEDS[name]} is not installed")
    results = measure(names, arguments.lengths, arguments.rounds, console)
    Findings(
        "seek",
        heading="The middle of an epoch, found again",
        before=[
            "`python benchmarks/seek.py --record`: from a fresh loader to the next batch,",
            f"after half an epoch in batches of {BATCH_SIZE}, without workers. Medians of",
            f"{arguments.rounds} rounds; a ratio is the median of the rounds' ratios. Read:",
            "samples read before that batch.",
        ],
        title=f"the middle of an epoch, {arguments.rounds} rounds",
        headings=HEADINGS,
        rows=rows_of(results),
        packages=("torch", "numpy", "accelerate", "torchdata"),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
