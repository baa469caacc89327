"""What do a save, a load and a resume cost, against everything that can grow? Linear or flat.

    python benchmarks/scaling.py [--only size ...] [--rounds 2] [--record]

* size: a state of 10 MB to 4 GB in ten tensors;
* tensors: 10 to 100,000 of them with 64 bytes each;
* ranks: 1 to 4 real ones under FSDP2, started by torchrun with gloo, with one model;
* kept: 1 to 1,000 checkpoints in the run directory;
* stock: a dataset of 10^3 to 10^7 samples with a stock shuffle, resumed in the middle of an epoch;
* sampler: one of 10^3 to 10^9 samples with ``ResumableSampler``, likewise;
* journal: 10^3 to 10^6 recorded steps.

Each value is the least of the rounds, each in a fresh process. The slope is fitted to log against
log over the upper half of the values, where what is fixed no longer hides what grows: about 1 is
linear, 0 flat. Above 1.2 a figure is called superlinear. Times below a millisecond are not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measuring import Findings, Line, parser_for, plot, run_child, slope_of, timed
from save_load import load_resumekit, save_resumekit
from seek import BATCH_SIZE, make_resumable, make_stock, middle, position_of_ours, seek_ours
from torch import nn

from resumekit.journal import Header, JournalFile, Record, compared, find_attempts, name_of
from resumekit.storage import Manifest, RetentionPolicy, StepName, Store

SUPERLINEAR = 1.2
LEAST_SECONDS = 1e-3
MEGABYTE = 10**6


def of_size(num_megabytes: int) -> dict[str, float]:
    """Save and load of a state of that size."""
    each = torch.ones(num_megabytes * MEGABYTE // 40)
    state = {"model": {str(number): each.clone() for number in range(10)}}
    return _saved_and_loaded(state)


def of_tensors(num_tensors: int) -> dict[str, float]:
    """Save and load of so many small tensors."""
    state = {"model": {f"layers.{n}.weight": torch.full((16,), n) for n in range(num_tensors)}}
    return _saved_and_loaded(state)


def _saved_and_loaded(state: dict[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        saving, _ = timed(lambda: save_resumekit(state, Path(folder, "run")))
        loading, found = timed(lambda: load_resumekit(Path(folder, "run")))
        last = next(reversed(state["model"]))
        assert torch.equal(found["model"][last], state["model"][last])
    return {"save": saving, "load": loading}


def of_ranks(num_ranks: int) -> dict[str, float]:
    """The second save, whose plan is known, and a resume, of real ranks."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_ranks), __file__, "--rank", folder]
        for _ in range(2):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
        times: dict[str, float] = {}
        for path in sorted(Path(folder).glob("times-*.json")):
            times |= json.loads(path.read_text())
        return times


class Numbered(torch.utils.data.Dataset[torch.Tensor]):
    """Eight samples for each of two steps."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((512,), float(index))


def train(folder: str) -> None:
    """A launch of the job whose ranks are measured; the first saves, the second resumes."""
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader

    from resumekit.adapters.torch import Checkpointer

    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(32)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    run = Path(folder, "run")
    is_new = not run.exists()
    torch.distributed.barrier()
    ckpt = Checkpointer(run, model=model, optimizer=optimizer, save_every=None)
    batches = iter(ckpt.batches(DataLoader(Numbered(), batch_size=2), epochs=100))
    times = {}
    times["resume"], batch = timed(lambda: next(batches))
    for _ in range(3 if is_new else 0):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        ckpt.save()  # made at the safe point, before the next batch
        times["save"], batch = timed(lambda: next(batches))
    if torch.distributed.get_rank() == 0:
        Path(folder, f"times-{1 if is_new else 2}.json").write_text(json.dumps(times))
    torch.distributed.barrier()
    os._exit(0)  # as a job is killed: nothing is saved at the end


def of_kept(num_kept: int) -> dict[str, float]:
    """A save with retention, and finding the newest, beside so many checkpoints."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        store = Store(Path(folder, "run"))
        store.acquire()
        policy = RetentionPolicy(keep_latest=num_kept)
        for step in range(1, num_kept + 1):
            _commit(store, step)
        saving, _ = timed(lambda: _commit(store, num_kept + 1))
        retaining, _ = timed(lambda: store.retain(policy))
        finding, _ = timed(lambda: store.open_step(max(store.step_names())))
        store.release()
    return {"save": saving, "retention": retaining, "find the newest": finding}


def _commit(store: Store, step: int) -> None:
    manifest = Manifest(
        run_id=store.run_id,
        attempt=store.attempt,
        step=step,
        created="2024-01-01T00:00:00+00:00",
        world_size=1,
        progress={},
        components=(),
        files=(),
    )
    name = StepName(step)
    store.commit(store.stage(name, num_bytes=0, num_files=0, directories=[]), manifest)


def of_stock(length: int) -> dict[str, float]:
    """The next batch in the middle of an epoch, by a fresh loader with a stock shuffle."""
    position = position_of_ours(make_stock, length, middle(length))
    seconds, _ = timed(lambda: seek_ours(make_stock(length), position))
    return {"resume": seconds}


def of_sampler(length: int) -> dict[str, float]:
    """The same with an order that has random access; nobody goes to the middle of 10^9 samples."""
    position = position_of_ours(make_resumable, length, 1)
    batch = middle(length)
    position["train"] |= {"batch": batch, "samples": batch * BATCH_SIZE}
    seconds, _ = timed(lambda: seek_ours(make_resumable(length), position))
    return {"resume": seconds}


def of_journal(num_steps: int) -> dict[str, float]:
    """A thousand records more, and the comparison that a resume reads, after so many steps."""
    header = Header("0" * 32, "1" * 32, 1, 0, 1, 0, True, (), None)
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        file = JournalFile(Path(folder, name_of(1, header.attempt, 0)), header)
        for step in range(1, num_steps + 1):
            file.append(Record(step).to_bytes())

        def append() -> None:
            for step in range(num_steps + 1, num_steps + 1001):
                file.append(Record(step).to_bytes())

        appending, _ = timed(append)
        file.close()
        now = replace(header, attempt="2" * 32, number=2, resumed_step=num_steps - 50)
        comparing, _ = timed(lambda: compared(now, find_attempts(Path(folder))))
    return {"1,000 steps": appending, "open at a resume": comparing}


@dataclass(frozen=True)
class Axis:
    """Something that can grow.

    Args:
        what: it is, with its unit.
        values: of it, ascending.
        measure: gives seconds by figure, for a value.
    """

    what: str
    values: Sequence[int]
    measure: Callable[[int], dict[str, float]]


def powers(first: int, last: int) -> list[int]:
    """Powers of ten."""
    return [10**exponent for exponent in range(first, last + 1)]


AXES = {
    "size": Axis("MB", (10, 40, 160, 640, 1280, 4000), of_size),
    "tensors": Axis("tensors", powers(1, 5), of_tensors),
    "ranks": Axis("ranks", (1, 2, 3, 4), of_ranks),
    "kept": Axis("checkpoints", powers(0, 3), of_kept),
    "stock": Axis("samples, stock shuffle", powers(3, 7), of_stock),
    "sampler": Axis("samples, ResumableSampler", powers(3, 9), of_sampler),
    "journal": Axis("steps", powers(3, 6), of_journal),
}


def verdict_of(points: Sequence[tuple[float, float]]) -> tuple[str, str]:
    """The slope over the upper half of the values, and what it is called."""
    upper = points[len(points) // 2 - (len(points) < 4) :]
    slope = slope_of(upper)
    if points[-1][1] < LEAST_SECONDS:
        return f"{slope:.2f}", "below a millisecond"
    return f"{slope:.2f}", "superlinear" if slope > SUPERLINEAR else "linear or flat"


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=2)
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES))
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        train(arguments.rank)
        return
    if arguments.child:
        name, value = arguments.child
        print(json.dumps(AXES[name].measure(int(value))))
        return
    rows, lines = [], {}
    for name in arguments.only:
        found = {value: least(name, value, arguments.rounds) for value in AXES[name].values}
        figures = list(next(iter(found.values())))
        lines[f"seconds, against {AXES[name].what}"] = several = []
        for figure in figures:
            points = [(value, times[figure]) for value, times in found.items()]
            several.append(Line(figure, points))
            ends = (f"{points[0][1]:.4f}", f"{points[-1][1]:.4f}")
            across = f"{points[0][0]:,} to {points[-1][0]:,} {AXES[name].what}"
            rows.append((name, across, figure, *ends, *verdict_of(points)))
    _publish(arguments, rows, lines)


def least(name: str, value: int, num_rounds: int) -> dict[str, float]:
    """The least seconds of each figure over the rounds."""
    rounds = [run_child(__file__, "--child", name, str(value)) for _ in range(num_rounds)]
    print(f"{name} {value:,}: {rounds[0]}", file=sys.stderr)
    return {figure: min(each[figure] for each in rounds) for figure in rounds[0]}


def _publish(arguments: Any, rows: Any, lines: dict[str, list[Line]]) -> None:
    if arguments.record:
        print(f"written to {plot('scaling', 'how much', lines)}")
    Findings(
        "scaling",
        heading="What a save, a load and a resume cost, against what can grow",
        before=[
            "`python benchmarks/scaling.py --record`: each value is the least of",
            f"{arguments.rounds} rounds, each in a fresh process. Saves are synchronous: training",
            "is blocked for all of them. The slope is that of log against log over the upper half",
            f"of the values; above {SUPERLINEAR} a figure is called superlinear.",
        ],
        title=f"cost against size, {arguments.rounds} rounds",
        headings=("", "from, to", "figure", "first s", "last s", "slope", ""),
        rows=rows,
        packages=("torch", "numpy"),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
