"""What does resumekit add to a step and to a save under each adapter, and which part adds it?

Each adapter runs the same tiny training (``same_training.py``) in a process of its own: bare, with
resumekit, and with resumekit and clocks around its parts, in turns. The parts are the journal
(``RunJournal``), the gradient watch of each step, the reports after steps 1 and 2, and what a save
spends on finding state that is not in the checkpoint.

    python benchmarks/overheads.py [--adapter torch ...] [--quick] [--record]

One table: CPU and clock time of a step, the reports after the first steps and the saves of a model
of 250 modules, and what the machine takes for the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from measuring import Findings, durations, parser_for, run_child
from same_training import TRAININGS, WIDTH, Model, Training, prepared
from torch.utils.data import default_collate

from resumekit.capture.user_state.user_state import UserState
from resumekit.record.journal import RECORD_BYTES
from resumekit.run import due_saves
from resumekit.run.components import RunComponents
from resumekit.run.journaling import RunJournal
from resumekit.run.report import Reporter

SMALL, LARGE = 12, 250  # modules
STEPS_PER_BLOCK = 10  # the journal digests random states at each such step
WARM_UP = 20
AIM = 40  # microseconds of CPU time a step, for the journal

# The parts that are measured: at each step, after the first two, and at a save.
JOURNAL, WATCH, REPORTS, CHECK, SAVE = "journal", "watch", "reports", "check", "save"
PARTS: dict[str, tuple[tuple[Any, str], ...]] = {
    JOURNAL: ((RunJournal, "note_batch"), (RunJournal, "step"), (RunJournal, "at_save")),
    WATCH: ((RunComponents, "observe_gradients"),),
    REPORTS: ((Reporter, "look"),),
    CHECK: ((UserState, "before_save"), (UserState, "state_dict"), (Reporter, "captured")),
    SAVE: ((due_saves, "save"),),
}


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    num_rounds: int = 12
    num_blocks: int = 10
    num_saves: int = 10


QUICK = Effort(num_rounds=1, num_blocks=2, num_saves=2)


@dataclass
class Clock:
    """Reads the clocks at each batch of a training; with ``timing`` those of the parts too.

    Attributes:
        spent: seconds inside the parts so far.
        batches: at each batch CPU seconds, seconds, and what was spent until then.
    """

    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    batches: list[tuple[float, float, dict[str, float]]] = field(default_factory=list)

    def collate(self, rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """A batch."""
        self.batches.append((time.process_time(), time.perf_counter(), dict(self.spent)))
        return {"rows": default_collate(rows)}

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Times every call of the parts' methods, in this process and as long as it is open."""
        methods = [(part, owner, name) for part in PARTS for owner, name in PARTS[part]]
        originals = [getattr(owner, name) for _, owner, name in methods]
        for (part, owner, name), original in zip(methods, originals, strict=True):
            setattr(owner, name, self._timed(part, original))
        try:
            yield
        finally:
            for (_, owner, name), original in zip(methods, originals, strict=True):
                setattr(owner, name, original)

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()  # the clocks of CPU time cost as much as some parts
            try:
                return call(*args, **kwargs)
            finally:
                self.spent[part] += time.perf_counter() - began

        return timed

    def per_step(self, *, first: int = WARM_UP, size: int = STEPS_PER_BLOCK) -> dict[str, float]:
        """Medians over blocks of steps: ``cpu`` and ``wall`` of a step and seconds of each part."""
        marks = self.batches[first::size]
        pairs = list(itertools.pairwise(marks))
        found = {
            "cpu": statistics.median((b[0] - a[0]) / size for a, b in pairs),
            "wall": statistics.median((b[1] - a[1]) / size for a, b in pairs),
        }
        for part in PARTS:
            found[part] = statistics.median((b[2][part] - a[2][part]) / size for a, b in pairs)
        return found


def run(adapter: str, training: Training, clock: Clock, *, is_timed: bool = False) -> None:
    """One training; a run directory of its own is removed afterwards."""
    gc.collect()
    with contextlib.ExitStack() as stack:
        if is_timed:
            stack.enter_context(clock.timing())
        if training.directory is not None:
            name = stack.enter_context(tempfile.TemporaryDirectory(dir=training.directory))
            training = replace(training, directory=Path(name, "run"))
        TRAININGS[adapter](replace(training, collate=clock.collate))


def measure_steps(adapter: str, effort: Effort, directory: Path) -> dict[str, float]:
    """Medians over rounds: a bare step, ours, their difference within a round, and the parts."""
    num_steps = WARM_UP + effort.num_blocks * STEPS_PER_BLOCK + 2
    bare = Training(SMALL, num_steps, default_collate)
    ours = replace(bare, directory=directory)
    rounds = []
    for number in range(effort.num_rounds + 1):  # the first round warms up
        clocks = Clock(), Clock(), Clock()
        order = [*range(number % 3, 3), *range(number % 3)]
        for which in order:
            training = ours if which else bare
            run(adapter, training, clocks[which], is_timed=which == 2)
        stock, with_us, timed = (clock.per_step() for clock in clocks)
        found = {f"{name} bare": stock[name] for name in ("cpu", "wall")}
        found |= {f"{name} ours": with_us[name] for name in ("cpu", "wall")}
        found |= {f"{name} added": with_us[name] - stock[name] for name in ("cpu", "wall")}
        rounds.append(found | {part: timed[part] for part in (JOURNAL, WATCH)})
    kept = rounds[1:]
    return {name: statistics.median(each[name] for each in kept) for name in kept[0]}


def measure_saves(adapter: str, effort: Effort, directory: Path) -> dict[str, float]:
    """Of a large model: a save and its parts, a bare step, and a report after a first step."""
    found: dict[str, float] = {}
    training = Training(LARGE, effort.num_saves + 4, default_collate, directory=directory)
    clock = Clock()
    run(adapter, replace(training, directory=None), clock)
    found["step"] = clock.per_step(first=2, size=1)["wall"]
    clock = Clock()
    run(adapter, training, clock, is_timed=True)
    found[REPORTS] = clock.batches[-1][2][REPORTS] / 2
    clock = Clock()
    run(adapter, replace(training, saves=True), clock, is_timed=True)
    saves = clock.per_step(first=3, size=1)
    return found | {part: saves[part] for part in (SAVE, CHECK, JOURNAL)}


def measure(adapter: str, effort: Effort) -> list[list[str]]:
    """The rows of one adapter; in a process of its own."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="overheads-", dir=".") as name, prepared(adapter):
        steps = measure_steps(adapter, effort, Path(name))
        large = measure_saves(adapter, effort, Path(name))
    rows = []
    for clock, shown in (("cpu", "CPU"), ("wall", "clock")):
        times = [us(steps[f"{clock} {which}"]) for which in ("bare", "ours", "added")]
        parts = [us(steps[JOURNAL]), us(steps[WATCH])] if clock == "wall" else ["", ""]
        rows.append([adapter, f"step, {shown} µs", *times, *parts])
    step, report = large["step"], large[REPORTS]
    times = [ms(step), ms(step + report), ms(report)]
    rows.append([adapter, "steps 1 and 2, ms", *times, "", ms(report)])
    parts = [ms(large[part]) for part in (JOURNAL, CHECK)]
    rows.append([adapter, "save, ms", "", ms(large[SAVE]), "", *parts])
    return rows


def limits(repeats: int) -> list[list[str]]:
    """What the machine takes for the same bytes: a copy in memory, durable files, a record."""
    model = Model(LARGE)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(1, WIDTH))["loss"].backward()
    optimizer.step()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    three = weights.repeat(3)  # AdamW has two moments
    copy, size = torch.empty_like(weights), f"{weights.nbytes / 2**20:.1f} MiB"
    three_size = f"{three.nbytes / 2**20:.1f} MiB"
    with tempfile.TemporaryDirectory(prefix="overheads-", dir=".") as name:
        path = Path(name, "file")

        def write(save: Callable[[Any], Any]) -> None:
            with path.open("wb") as file:
                save(file)
                file.flush()
                os.fsync(file.fileno())

        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        handle = os.open(path.with_name("journal"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        rows = [
            (f"copy {size}, ms", ms, lambda: copy.copy_(weights)),
            (f"write {three_size}, ms", ms, lambda: write(three.numpy().tofile)),
            ("torch.save, ms", ms, lambda: write(lambda file: torch.save(state, file))),
            (
                f"write {RECORD_BYTES} B, µs",
                us,
                lambda: os.write(handle, bytes(RECORD_BYTES)),
            ),
        ]
        found = [["machine", what, shown(seconds_of(call, repeats))] for what, shown, call in rows]
        os.close(handle)
    return [[*row, "", "", "", ""] for row in found]


def seconds_of(call: Callable[[], Any], repeats: int) -> float:
    """The median of some calls."""
    return statistics.median(durations(call, repeats))


def us(seconds: float) -> str:
    """In microseconds."""
    return f"{seconds * 1e6:,.1f}"


def ms(seconds: float) -> str:
    """In milliseconds."""
    return f"{seconds * 1e3:,.2f}"


HEADINGS = ("adapter", "what", "bare", "resumekit", "added", "journal", "tracker")


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__)
    parser.add_argument("--adapter", nargs="+", choices=list(TRAININGS), help="these adapters")
    parser.add_argument("--quick", action="store_true", help="one round, to see that it runs")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else Effort()
    adapters = arguments.adapter or list(TRAININGS)
    if arguments.child:
        with contextlib.redirect_stdout(io.StringIO()):
            rows = [row for each in adapters for row in measure(each, effort)]
        print(json.dumps(rows))
        return
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes
    options = ["--child", *["--quick"] * arguments.quick, "--adapter"]
    rows = [row for each in adapters for row in run_child(__file__, *options, each)]
    rows += limits(1 if arguments.quick else 20)
    Findings(
        "overheads",
        heading="What resumekit adds to a step and to a save",
        before=[
            "`python benchmarks/overheads.py --record`: the same training of linear layers",
            f"with AdamW on a map-style dataset, bare and with resumekit, {SMALL} modules for",
            f"steps and {LARGE} for saves, one process for each adapter, by turns. Steps:",
            f"medians of {effort.num_rounds} rounds, each the median over blocks of",
            f"{STEPS_PER_BLOCK} steps. The journal and the tracker are timed in a third run of",
            "each round, by a clock around their methods. The tracker is the gradient watch in",
            "a step, and in a save the search for state that is not in the checkpoint; after",
            "steps 1 and 2 that is reported. A save is durable and digested when it returns.",
            "The machine's rows: the weights copied in memory; weights and moments written",
            "and fsynced as one file, as they are and by `torch.save`; a record of the journal",
            f"appended to a file. The aim is at most {AIM} microseconds of CPU time a step for",
            "the journal. Between training steps caches are cold: `step_overhead.py` measures",
            "the same in a loop of nothing else.",
        ],
        title=f"what resumekit adds, {effort.num_rounds} rounds",
        headings=HEADINGS,
        rows=rows,
        packages=("torch", "accelerate", "transformers", "lightning", "deepspeed"),
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
