"""``resumekit demo``: a real training run, killed and resumed, beside one that was never killed."""

from __future__ import annotations

import re
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from resumekit.errors import ConfigurationError
from resumekit.prove import ProveResult, print_result, prove
from resumekit.record.conditions import gpu_settings
from resumekit.record.moments import (
    STEP,
    Moment,
    TracedProcess,
    TraceTail,
    read_trace,
    records_of,
    steps_of,
)

NUM_EPOCHS = 3
STEPS_PER_EPOCH = 100
QUICK_STEPS_PER_EPOCH = 25

_POLL_SECONDS = 0.2
_ROWS_BEFORE_KILL = 2
_ROWS_AFTER_RESUME = 3
_SAMPLES_SHOWN = 3

# The folders that `prove` keeps for its two runs, with what a person calls them.
_RUNS = {"reference": "never killed", "killed": "killed and resumed"}


def run_demo(*, seed: int, num_kills: int, quick: bool, device: str = "cpu") -> bool:
    """Whether the killed run ended with the same bits; prints how it went.

    Args:
        seed: of the training and of the instants of the kills.
        num_kills: how often the run is killed.
        quick: train a quarter as long.
        device: ``cpu`` or ``cuda``.

    Raises:
        ConfigurationError: it is another one, or there is no GPU.
    """
    console = Console(highlight=False)
    if device not in ("cpu", "cuda"):
        raise ConfigurationError("--device", found=repr(device), expected="cpu or cuda")
    if device == "cuda":
        console.print(_gpus())
    steps_per_epoch = QUICK_STEPS_PER_EPOCH if quick else STEPS_PER_EPOCH
    console.print(
        "A small transformer learns to read the sources of Python's own library.\n"
        "The same command runs twice: once uninterrupted, and once killed with SIGKILL\n"
        f"{num_kills} times at random instants and started again.\n"
    )
    with tempfile.TemporaryDirectory(prefix="resumekit-demo-") as name:
        directory = Path(name)
        with _progress(console, directory, NUM_EPOCHS * steps_per_epoch) as progress:
            result = prove(
                _command(seed, steps_per_epoch, device),
                kills=num_kills,
                seed=seed,
                keep=directory,
                on_event=lambda line: progress.console.print(Text(line, style="dim")),
            )
        reference = read_trace(directory / "reference" / "trace")[0]
        killed = read_trace(directory / "killed" / "trace")[0]
    for before, after in pairwise(killed):
        _print_meeting(console, reference[-1], before, after)
    print_result(result, console)
    _print_time_lost(result, killed, console)
    return result.ok


def _command(seed: int, steps_per_epoch: int, device: str = "cpu") -> list[str]:
    script = [sys.executable, "-m", "resumekit.demo_script", "{dir}", "--seed", str(seed)]
    length = ["--epochs", str(NUM_EPOCHS), "--steps-per-epoch", str(steps_per_epoch)]
    return [*script, *length, "--device", device]


def _gpus() -> str:
    """The GPUs and what their results depend on; raises ConfigurationError where there are none."""
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        raise ConfigurationError(
            "--device cuda", found=f"no GPU that torch can use ({versions})", expected="one"
        )
    return ", ".join([versions, *(f"{name} {each}" for name, each in gpu_settings().items())])


@contextmanager
def _progress(console: Console, directory: Path, num_steps: int) -> Iterator[Progress]:
    """Bars that follow the traces of both runs while they are written."""
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(),
        TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
        TimeElapsedColumn(),
    )
    done = threading.Event()
    with Progress(*columns, console=console) as progress:
        bars = {
            directory / run: progress.add_task(text, total=num_steps, start=False)
            for run, text in _RUNS.items()
        }
        follower = threading.Thread(target=_follow, args=(progress, bars, done), daemon=True)
        follower.start()
        try:
            yield progress
        finally:
            done.set()
            follower.join()


def _follow(progress: Progress, bars: dict[Path, TaskID], done: threading.Event) -> None:
    tails: dict[Path, TraceTail] = {}
    while True:
        is_last_look = done.wait(_POLL_SECONDS)
        for run, bar in bars.items():
            for launch in sorted((run / "trace").glob("launch-*")):
                progress.start_task(bar)
                step = tails.setdefault(launch, TraceTail(launch)).poll()
                if step is not None:
                    progress.update(bar, completed=step)
        if is_last_look:
            return


def _print_meeting(
    console: Console, reference: TracedProcess, before: TracedProcess, after: TracedProcess
) -> None:
    """The last steps before a kill and the first after the resume, beside those never killed."""
    truth = {record.step: record for record in records_of([reference], STEP)}
    rows = [
        *(("before", record) for record in [*records_of([before], STEP)][-_ROWS_BEFORE_KILL:]),
        *(("after", record) for record in islice(records_of([after], STEP), _ROWS_AFTER_RESUME)),
    ]
    table = Table(box=SIMPLE, pad_edge=False, show_edge=False)
    for column in (f"kill {after.launch}", "step", "loss, never killed", "loss, killed", "samples"):
        table.add_column(column, no_wrap=True)
    table.add_column(no_wrap=True)
    for when, record in rows:
        table.add_row(when, *_cells(truth.get(record.step), record))
    console.print(table)
    console.print()


def _cells(expected: Moment | None, found: Moment) -> tuple[str | Text, ...]:
    then = {} if expected is None else expected.fields
    parts = ("values", "samples", "lr", "epoch", "batch")
    equal = all(then.get(part) == found.fields.get(part) for part in parts)
    samples = ", ".join(map(str, found.fields.get("samples", [])[:_SAMPLES_SHOWN]))
    return (
        str(found.step),
        _loss(then),
        _loss(found.fields),
        f"{samples}, …",
        Text("equal", "green") if equal else Text("differs", "red"),
    )


def _loss(fields: Mapping[str, Any]) -> str:
    """Every bit of it; the zeros at the end that a 32-bit number leaves are not shown."""
    return re.sub("0+p", "p", fields.get("values", {}).get("loss", "-"))


def _print_time_lost(
    result: ProveResult, killed: Sequence[TracedProcess], console: Console
) -> None:
    trial = result.trials[0]
    trained = steps_of(killed, STEP)
    console.print(
        f"{trial.num_kills} kills cost {trial.seconds - result.reference_seconds:.1f} s: "
        f"{len(trained) - len(set(trained))} steps trained again, {trial.num_kills} more starts."
    )
