"""What does a batch cost that is tracked and not saved? The bare loop and ours, side by side.

Two loops over loaders that are made alike run in one process and alternate: a bare one, and one
through ``Checkpointer.batches`` with its ``step(loss=loss)`` and its journal. The samples are ready
and the collate function makes nothing of them, so that a loader does as little as it can.

    python benchmarks/step_overhead.py [--rounds 7] [--batches 10000] [--only "2 workers" ...]
        [--sizes 1 32 512] [--record]

Prints the CPU time of the main process with all its threads for a batch of each loop: the minimum
and the median of the rounds, and what tracking adds to them. Where ``torchdata`` is not installed,
its loader is left out. See ``overheads.py`` for steps that train, whose caches are cold.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from measuring import Findings, MachineLoad, parser_for, silenced, version_of
from rich.console import Console
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
)

from resumekit.adapters.torch import Checkpointer
from resumekit.data import ResumableSampler

BATCH_SIZES = (1, 32, 512)
# Microseconds of CPU time that tracking may add to a batch.
MAP_STYLE, OTHERS = 40, 60

NUM_BATCHES = 10_000  # of a round
# The loops take turns of so many batches, after a few untimed ones.
BATCHES_PER_TURN = 250
WARM_UP = 50


class Ready(Dataset[Any]):
    """Samples that are there, and cost nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> list[int]:
        """All samples of a batch at once."""
        return indices


class Stream(IterableDataset[int]):
    """The same without indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def make(length: int, batch_size: int, *, ranks: int = 1, **settings: Any) -> DataLoader[Any]:
    """A loader over ready samples, as many for each rank."""
    data = Ready(length * ranks)
    sampler = settings.pop("sampler", None)
    given = {"sampler": sampler(data)} if sampler is not None else {"shuffle": True}
    return DataLoader(data, batch_size, collate_fn=len, **given, **settings)


def distributed(data: Any) -> DistributedSampler[Any]:
    """The first of two ranks."""
    return DistributedSampler(data, num_replicas=2, rank=0)


def weighted(data: Any) -> WeightedRandomSampler:
    """With replacement; all weigh the same."""
    return WeightedRandomSampler([1.0] * len(data), len(data))


class CustomSampler(Sampler[int]):
    """A custom sampler, which may draw while it is iterated."""

    def __init__(self, data: Any) -> None:
        self._length = len(data)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self._length).tolist()


def make_torchdata(length: int, batch_size: int) -> Any:
    """The loader of torchdata."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(Ready(length), batch_size, shuffle=True, collate_fn=len)


def make_stream(length: int, batch_size: int) -> DataLoader[Any]:
    """A loader that is replayed to reach a position."""
    return DataLoader(Stream(length), batch_size, collate_fn=len)


def make_dict(length: int, batch_size: int) -> dict[str, DataLoader[Any]]:
    """Two loaders in step."""
    return {name: make(length, batch_size) for name in ("a", "b")}


@dataclass(frozen=True)
class Kind:
    """A way to write a loop.

    Args:
        make: a fresh loader, or a dict of them, for a number of samples and a batch size.
        target: the microseconds that tracking may add to a batch.
        options: of the Checkpointer.
        needs: a distribution that it is left out without.
    """

    make: Callable[[int, int], Any]
    target: float = OTHERS
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: str = "torch"


TORCHDATA = "StatefulDataLoader"


def kind(target: float, options: Mapping[str, Any] | None = None, **settings: Any) -> Kind:
    """A torch DataLoader with these settings."""
    return Kind(partial(make, **settings), target, options or {})


KINDS = {
    "shuffle=True": kind(MAP_STYLE),
    'the same, save_every="10min"': kind(MAP_STYLE, {"save_every": "10min"}),
    "DistributedSampler": kind(MAP_STYLE, sampler=distributed, ranks=2),
    "WeightedRandomSampler": kind(MAP_STYLE, sampler=weighted),
    "ResumableSampler": kind(MAP_STYLE, sampler=ResumableSampler),
    "a sampler of yours": kind(OTHERS, sampler=CustomSampler),
    TORCHDATA: Kind(make_torchdata, needs="torchdata"),
    "a dict of two loaders": Kind(make_dict),
    "IterableDataset": Kind(make_stream),
    "2 workers": kind(OTHERS, num_workers=2),
    "2 persistent workers": kind(OTHERS, num_workers=2, persistent_workers=True),
}


def bare_loop(loaders: Any) -> Callable[[], Any]:
    """What asks a bare loop for its next batch."""
    together = isinstance(loaders, Mapping)
    batches: Iterator[Any] = zip(*loaders.values(), strict=True) if together else iter(loaders)
    return batches.__next__


@contextlib.contextmanager
def tiny_run(**options: Any) -> Iterator[Checkpointer]:
    """A run of one layer that makes no save, not even of its end."""
    model = nn.Linear(1, 1)
    with tempfile.TemporaryDirectory() as directory, silenced():
        run = Checkpointer(
            directory,
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            **{"save_every": 10**9, **options},
        )
        try:
            yield run
        finally:
            run._run.close()


def tracked_loop(run: Checkpointer, loaders: Any) -> Callable[[], Any]:
    """What asks ours for its next batch and marks a step."""
    batches, loss = run.batches(loaders, epochs=1), torch.tensor(0.5)

    def turn() -> None:
        next(batches)
        run.step(loss=loss)

    return turn


def cpu_seconds(turn: Callable[[], Any], num_batches: int) -> float:
    """Of this process and its threads, for so many batches."""
    began = time.process_time()
    for _ in range(num_batches):
        turn()
    return time.process_time() - began


class Round(NamedTuple):
    """Microseconds of CPU time a batch, each over all batches of one round."""

    bare: float
    tracked: float


def measure(kind: Kind, batch_size: int, num_batches: int) -> Round:
    """One round: both loops over fresh loaders, turn by turn."""
    length = batch_size * (WARM_UP + num_batches + 1)  # no epoch ends in between
    with tiny_run(**kind.options) as run:
        loops = (
            bare_loop(kind.make(length, batch_size)),
            tracked_loop(run, kind.make(length, batch_size)),
        )
        for loop in loops:
            cpu_seconds(loop, WARM_UP)
        took, left, is_even = [0.0, 0.0], num_batches, False
        while left:
            turn, is_even = min(BATCHES_PER_TURN, left), not is_even
            for which in (0, 1) if is_even else (1, 0):
                took[which] += cpu_seconds(loops[which], turn)
            left -= turn
    bare, tracked = (seconds / num_batches * 1e6 for seconds in took)
    return Round(bare, tracked)


HEADINGS = (
    "loader",
    "batch",
    "loop",
    "min CPU µs",
    "median CPU µs",
    "added, min",
    "added, median",
    "quartile range",
    "target",
    "result",
)


def rows_of(name: str, batch_size: int, rounds: Sequence[Round]) -> list[tuple[str, ...]]:
    """The bare loop, and ours with what it adds: minimum less minimum, median of the rounds."""
    bare, tracked = ([each[which] for each in rounds] for which in (0, 1))
    differences = [each.tracked - each.bare for each in rounds]
    added = min(tracked) - min(bare)
    quartiles = statistics.quantiles(differences, n=4) if len(rounds) > 1 else (0.0, 0.0, math.inf)
    scatter = quartiles[2] - quartiles[0]
    target = KINDS[name].target
    margin = target - added
    verdict = "met" if margin >= 0 else "missed"
    if scatter > abs(margin):
        verdict = "not measurable"
    middle = [f"{statistics.median(each):.1f}" for each in (bare, tracked, differences)]
    numbers = (f"{added:.1f}", middle[2], f"{scatter:.1f}", f"{target:g}", verdict)
    return [
        (name, str(batch_size), "bare", f"{min(bare):.1f}", middle[0], *[""] * len(numbers)),
        (name, str(batch_size), "tracked", f"{min(tracked):.1f}", middle[1], *numbers),
    ]


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=7)
    parser.add_argument("--batches", type=int, default=NUM_BATCHES, help="of a round")
    parser.add_argument("--only", nargs="+", choices=list(KINDS), help="these loaders")
    parser.add_argument("--sizes", nargs="+", type=int, default=BATCH_SIZES, help="of a batch")
    arguments = parser.parse_args()
    console, load = Console(), MachineLoad()
    rows: list[tuple[str, ...]] = []
    for name in arguments.only or KINDS:
        if not version_of(KINDS[name].needs):
            console.print(f"{name} is left out: {KINDS[name].needs} is not installed")
            continue
        for size in arguments.sizes:
            numbers = range(arguments.rounds)
            rounds = [measure(KINDS[name], size, arguments.batches) for _ in numbers]
            rows += rows_of(name, size, rounds)
    Findings(
        "step-overhead",
        heading="What tracking adds to a batch",
        before=[
            "`python benchmarks/step_overhead.py --record`: microseconds of CPU time of the main",
            "process, its threads included, for the next batch and, in the tracked loop,",
            f"`step(loss=loss)` with its journal, without a save. {arguments.rounds} rounds of",
            f"{arguments.batches:,} batches of each loop, in turns of {BATCHES_PER_TURN}, in one "
            "process. Samples are",
            "ready and not collated. Added, min: the smallest round of the tracked loop less that",
            "of the bare one, which the target is for. Added, median, and quartile range: of the",
            "rounds' differences. A quartile range that is larger than the margin to the target",
            "makes the result not measurable.",
        ],
        title=f"CPU of a batch, tracked and not saved, {arguments.rounds} rounds",
        headings=HEADINGS,
        rows=rows,
        packages=("torch", "numpy", "torchdata"),
        load=load,
        part=", ".join(arguments.only or ()),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
