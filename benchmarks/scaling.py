"""What do a save, a load and a resume cost, against everything that can grow? Linear or flat.

    python benchmarks/scaling.py [--only size ...] [--rounds 1] [--record]

All of them take six minutes. With ``--only`` the record is a section of the page of that day, and
the plot has the names of what was measured in its own.

* size: a model of 10 MB to 4 GB in ten tensors, under the adapter for plain torch;
* tensors: 10 to 100,000 of them with 64 bytes each, likewise;
* ranks: 1 to 4 real ones under FSDP2, started by torchrun with gloo, with one model;
* kept: 1 to 1,000 checkpoints in the run directory;
* stock: a dataset of 10^3 to 10^7 samples with a stock shuffle, resumed in the middle of an epoch;
* sampler: one of 10^3 to 10^9 samples with ``ResumableSampler``, likewise;
* journal: 10^3 to 10^6 recorded steps.

An async save has two figures: for how long it blocks the training, and when it is durable.

Each value is the least of the rounds, each in a fresh process. The slope is fitted to log against
log over the upper half of the values, where what is fixed no longer hides what grows: about 1 is
linear, 0 flat. Above 1.2 a figure is called superlinear. Times below a millisecond are not judged.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from measuring import (
    Findings,
    Line,
    MachineLoad,
    Plot,
    draw,
    in_fresh_process,
    parser_for,
    slope_of,
    timed,
)
from seek import (
    BATCH_SIZE,
    draw_once,
    make_resumable,
    make_stock,
    middle,
    position_of_ours,
    seek_ours,
)
from torch import nn
from workload import SavingRun, Training

from resumekit.record.comparison import compared
from resumekit.record.conditions import Header
from resumekit.record.journal import JournalFile, Record, find_attempts, name_of
from resumekit.storage.directories import StepName
from resumekit.storage.manifest import Manifest
from resumekit.storage.retention import RetentionPolicy
from resumekit.storage.store import Store

SUPERLINEAR = 1.2
LEAST_SECONDS = 1e-3
NUM_SAVES = 5
MEGABYTE = 10**6
SAVE, BLOCKED, DURABLE, LOAD = "save", "async save, blocked", "async save, durable", "load"


def of_size(num_megabytes: int) -> dict[str, float]:
    """Saves and a load of a model of that size."""
    return _saved_and_loaded(10, num_megabytes * MEGABYTE // 40)


def of_tensors(num_tensors: int) -> dict[str, float]:
    """Saves and a load of so many small tensors."""
    return _saved_and_loaded(num_tensors, 16)


def _saved_and_loaded(num_tensors: int, num_elements: int) -> dict[str, float]:
    """The least of two saves each, after one that allocates and plans."""
    parameters = [nn.Parameter(torch.full((num_elements,), float(n))) for n in range(num_tensors)]
    model = nn.ParameterList(parameters)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    logging.getLogger("resumekit").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        saving, _ = _saves(Path(folder, "saved"), training, is_async=False)
        blocked, durable = _saves(Path(folder, "async"), training, is_async=True)
        with torch.no_grad():
            parameters[-1].zero_()
        loading, run = timed(lambda: SavingRun(Path(folder, "saved"), training))
        assert parameters[-1][0] == num_tensors - 1, "not what was saved"
        run.leave()
    return {SAVE: saving, BLOCKED: blocked, DURABLE: durable, LOAD: loading}


def _saves(directory: Path, training: Training, *, is_async: bool) -> tuple[float, float]:
    """For how long a save blocks, and when it is durable."""
    run = SavingRun(directory, training, keep_latest=1, async_save=is_async)
    run.save()
    blocked, durable = [], []
    for _ in range(2):
        run.finish()
        gc.collect()
        seconds, _ = timed(run.save)
        waited, _ = timed(run.checkpointer.wait)
        blocked.append(seconds)
        durable.append(seconds + waited)
    run.finish()
    run.leave()
    return min(blocked), min(durable)


def of_ranks(num_ranks: int) -> dict[str, float]:
    """Saves, whose plan is known from the first one, and a resume, of real ranks."""
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
    """A launch of the job whose ranks are measured; the second one resumes, and saves async."""
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
    ckpt = Checkpointer(
        run,
        model=model,
        optimizer=optimizer,
        save_every=None,
        async_save=not is_new,
        exclude={"variables"},  # the first batch is requested in another line than the others
    )
    batches = iter(ckpt.batches(DataLoader(Numbered(), batch_size=2), epochs=100))
    began, batch = timed(lambda: next(batches))
    blocked, durable = [], []
    for _ in range(NUM_SAVES):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        ckpt.save()  # made at the safe point, before the next batch
        gc.collect()  # a collection of torch's 400,000 objects takes longer than a save
        seconds, batch = timed(lambda: next(batches))
        waited, _ = timed(ckpt.wait)
        blocked.append(seconds)
        durable.append(seconds + waited)
    if is_new:
        times = {SAVE: min(blocked)}
    else:
        times = {"resume": began, BLOCKED: min(blocked), DURABLE: min(durable)}
    if torch.distributed.get_rank() == 0:
        Path(folder, f"times-{1 if is_new else 2}.json").write_text(json.dumps(times))
    torch.distributed.barrier()
    os._exit(0)  # as a job is killed: nothing is saved at the end


def of_kept(num_kept: int) -> dict[str, float]:
    """A new attempt beside so many checkpoints: it finds the newest, saves and deletes one."""
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        store = _acquired(folder)
        for step in range(1, num_kept + 1):
            _commit(store, step)
        store.release()
        store = _acquired(folder)
        finding, _ = timed(lambda: store.open_step(max(store.step_names())))
        saving, _ = timed(lambda: _commit(store, num_kept + 1))
        retaining, deleted = timed(lambda: store.retain(RetentionPolicy(keep_latest=num_kept)))
        assert deleted == [StepName(1)]
        store.release()
    return {SAVE: saving, "retention": retaining, "find the newest": finding}


def _acquired(folder: str) -> Store:
    store = Store(Path(folder, "run"))
    store.acquire()
    return store


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
    drawing, _ = timed(lambda: draw_once(make_stock(length), None))
    seconds, _ = timed(lambda: seek_ours(make_stock(length), position))
    return {"resume": seconds, "torch's permutation alone": drawing}


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
    parser = parser_for(__doc__, rounds=1, has_tiny=True)
    parser.add_argument("--only", nargs="+", choices=AXES, default=[], help="these")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        train(arguments.rank)
        return
    machine_load = MachineLoad()
    rows, plots = [], []
    for name in arguments.only or AXES:
        values = AXES[name].values[: 2 if arguments.tiny else None]
        found = {value: least(name, value, arguments.rounds) for value in values}
        figures = list(next(iter(found.values())))
        lines: list[Line] = []
        for figure in figures:
            points = [(value, times[figure]) for value, times in found.items()]
            lines.append(Line(figure, points))
            ends = (f"{points[0][1]:.4f}", f"{points[-1][1]:.4f}")
            across = f"{points[0][0]:,} to {points[-1][0]:,} {AXES[name].what}"
            rows.append((name, across, figure, *ends, *verdict_of(points)))
        plots.append(Plot(AXES[name].what, "seconds", lines))
    _publish(arguments, rows, plots, machine_load)


def least(name: str, value: int, num_rounds: int) -> dict[str, float]:
    """The least seconds of each figure over the rounds."""
    rounds = [
        in_fresh_process(AXES[name].measure, value, preload=("workload", "seek"))
        for _ in range(num_rounds)
    ]
    shown = ", ".join(f"{figure} {seconds:.4f} s" for figure, seconds in rounds[0].items())
    print(f"{name} {value:,}: {shown}", file=sys.stderr)
    return {figure: min(each[figure] for each in rounds) for figure in rounds[0]}


def _publish(
    arguments: argparse.Namespace,
    rows: Sequence[Sequence[str]],
    plots: Sequence[Plot],
    machine_load: MachineLoad,
) -> None:
    if arguments.record:
        print(f"written to {draw('-'.join(['scaling', *arguments.only]), plots)}")
    Findings(
        "scaling",
        heading="What a save, a load and a resume cost, against what can grow",
        before=[
            "`python benchmarks/scaling.py --record`: each value is the least of",
            f"{arguments.rounds} rounds, each in a fresh process. A save is durable when it",
            "returns; an async save blocks the training first, and is durable later. The slope is",
            "that of log against log over the upper half of the values; above",
            f"{SUPERLINEAR} a figure is called superlinear.",
        ],
        title=f"cost against size, {arguments.rounds} rounds",
        headings=("against", "from, to", "figure", "first s", "last s", "slope", "verdict"),
        rows=rows,
        packages=("torch", "numpy"),
        load=machine_load,
        part=", ".join(arguments.only),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
