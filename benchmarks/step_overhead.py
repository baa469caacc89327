"""What does a batch cost that is tracked and not saved? Stock loops and ours, side by side.

Two loops over loaders that are made alike run in one process and alternate, some batches each: a
stock one, and one through ``Checkpointer.batches`` with its ``step()``. The samples are ready and
the collate function makes nothing of them, so that a loader does as little as it can.

    python benchmarks/step_overhead.py [--rounds 3] [--only "2 workers" ...] [--record]

Prints microseconds a batch, what tracking adds to them, and the ratio; then what it adds to the CPU
time of the main process alone, and what a third loop without the journal shows to be the journal's.
Workers that a training step leaves time for cost only that. Where ``torchdata`` is not installed,
its loader is left out. See ``overheads.py`` for steps that train, whose caches are cold.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from measuring import Findings, parser_for, silenced, version_of
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
AIM = 40  # microseconds of CPU time

# A loop is timed over so many batches at once, so often in a round, after a few untimed ones.
BATCHES_PER_TURN = 20
PAIRS_PER_ROUND = 50
WARM_UP = 20
NUM_BATCHES = WARM_UP + BATCHES_PER_TURN * PAIRS_PER_ROUND + 1  # no epoch ends in between


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


def make(batch_size: int, *, ranks: int = 1, **settings: Any) -> DataLoader[Any]:
    """A loader over ready samples, enough for one rank of so many."""
    data = Ready(NUM_BATCHES * batch_size * ranks)
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


def make_torchdata(batch_size: int) -> Any:
    """The loader of torchdata."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    data = Ready(NUM_BATCHES * batch_size)
    return StatefulDataLoader(data, batch_size, shuffle=True, collate_fn=len)


def make_stream(batch_size: int) -> DataLoader[Any]:
    """A loader that is replayed to reach a position."""
    return DataLoader(Stream(NUM_BATCHES * batch_size), batch_size, collate_fn=len)


@dataclass(frozen=True)
class Kind:
    """A way to write a loop.

    Args:
        make: a fresh loader, or a dict of them, for a batch size.
        options: of the Checkpointer.
        needs: a distribution that it is left out without.
    """

    make: Callable[[int], Any]
    options: Mapping[str, Any]
    needs: str = "torch"


TORCHDATA = "StatefulDataLoader"


def kind(options: Mapping[str, Any] | None = None, **settings: Any) -> Kind:
    """A torch DataLoader with these settings."""
    return Kind(lambda batch_size: make(batch_size, **settings), options or {})


KINDS = {
    "shuffle=True": kind(),
    'the same, save_every="10min"': kind({"save_every": "10min"}),
    "DistributedSampler": kind(sampler=distributed, ranks=2),
    "WeightedRandomSampler": kind(sampler=weighted),
    "ResumableSampler": kind(sampler=ResumableSampler),
    "a sampler of yours": kind(sampler=CustomSampler),
    TORCHDATA: Kind(make_torchdata, {}, "torchdata"),
    "a dict of two loaders": Kind(lambda size: {"a": make(size), "b": make(size)}, {}),
    "IterableDataset": Kind(make_stream, {}),
    "2 workers": kind(num_workers=2),
    "2 persistent workers": kind(num_workers=2, persistent_workers=True),
}


def stock_loop(loaders: Any) -> Callable[[], Any]:
    """What asks a stock loop for its next batch."""
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


def tracked_loop(run: Checkpointer, loaders: Any, *, has_journal: bool) -> Callable[[], Any]:
    """What asks ours for its next batch and marks a step."""
    if not has_journal:
        run._run.journal.close()
    batches, loss = run.batches(loaders, epochs=1), torch.tensor(0.5)

    def turn() -> None:
        next(batches)
        run.step(loss=loss)

    return turn


class Seconds(NamedTuple):
    """What a batch took: on the clock, and of the main process's CPU time."""

    clock: float
    cpu: float


def seconds_per_batch(turn: Callable[[], Any], num_batches: int) -> Seconds:
    """The mean over so many batches."""
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(num_batches):
        turn()
    return Seconds(
        (time.perf_counter() - clock) / num_batches, (time.process_time() - cpu) / num_batches
    )


class Turn(NamedTuple):
    """A batch of each loop, in pairs that followed one another."""

    stock: Seconds
    without: Seconds
    tracked: Seconds


def measure(kind: Kind, batch_size: int) -> list[Turn]:
    """One round: the stock loop, ours without the journal, and ours, turn by turn."""
    pairs = []
    with contextlib.ExitStack() as stack:
        loops = [stock_loop(kind.make(batch_size))]
        for has_journal in (False, True):
            tracked = stack.enter_context(tiny_run(**kind.options))
            loops.append(tracked_loop(tracked, kind.make(batch_size), has_journal=has_journal))
        for loop in loops:
            seconds_per_batch(loop, WARM_UP)
        for number in range(PAIRS_PER_ROUND):
            order = [*range(number % 3, 3), *range(number % 3)]
            took = {which: seconds_per_batch(loops[which], BATCHES_PER_TURN) for which in order}
            pairs.append(Turn(took[0], took[1], took[2]))
    return pairs


TIMES = ("stock µs", "tracked µs", "added µs", "ratio", "added CPU µs", "journal CPU µs")
HEADINGS = ("loader", "batch", *TIMES)


def row_of(name: str, batch_size: int, pairs: Sequence[Turn]) -> tuple[str, ...]:
    """Medians over the pairs, also of what is added and of the ratios."""

    def median(value: Callable[[Turn], float]) -> float:
        return statistics.median(map(value, pairs))

    return (
        name,
        str(batch_size),
        f"{median(lambda turn: turn.stock.clock) * 1e6:.1f}",
        f"{median(lambda turn: turn.tracked.clock) * 1e6:.1f}",
        f"{median(lambda turn: turn.tracked.clock - turn.stock.clock) * 1e6:.1f}",
        f"{median(lambda turn: turn.tracked.clock / turn.stock.clock):.2f}x",
        f"{median(lambda turn: turn.tracked.cpu - turn.stock.cpu) * 1e6:.1f}",
        f"{median(lambda turn: turn.tracked.cpu - turn.without.cpu) * 1e6:.1f}",
    )


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=3)
    parser.add_argument("--only", nargs="+", choices=list(KINDS), help="these loaders")
    arguments = parser.parse_args()
    console = Console()
    rows = []
    for name in arguments.only or KINDS:
        if not version_of(KINDS[name].needs):
            console.print(f"{name} is left out: {KINDS[name].needs} is not installed")
            continue
        for batch_size in BATCH_SIZES:
            rounds = [measure(KINDS[name], batch_size) for _ in range(arguments.rounds)]
            rows.append(row_of(name, batch_size, [turn for pairs in rounds for turn in pairs]))
    num_pairs = arguments.rounds * PAIRS_PER_ROUND
    Findings(
        "step-overhead",
        heading="What tracking adds to a batch",
        before=[
            "`python benchmarks/step_overhead.py --record`: the next batch and, in ours,",
            "`step(loss=loss)`, without a save. A third loop has no journal. In pairs of",
            f"{BATCHES_PER_TURN} batches in one process; medians of {num_pairs} pairs, also of",
            "their differences and ratios. Samples are ready and not collated. CPU: of the",
            "main process, which is all that workers cost where a step leaves them time.",
            f"The aim is to add at most {AIM} microseconds of CPU time to a map-style loader.",
        ],
        title=f"a batch, tracked and not saved, {arguments.rounds} rounds",
        headings=HEADINGS,
        rows=rows,
        packages=("torch", "numpy", "torchdata"),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
