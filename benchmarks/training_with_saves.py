"""How much longer does a training take that saves, when it computes on one core?

Steps of about 30 ms with a state of 50 MB: a forward and a backward pass, a step of AdamW, and a
product of matrices whose size is chosen so that the step takes as long. Two runs of the same steps
follow one another as a pair, in random order: one saves every 50 steps, the other never. Both are
resumekit's, so that only the saves differ. The clock runs from the first batch to the one after the
last step, which is when the last save has been made or handed over. Short runs warm up.

One thread computes. It is not bound to a core: what saves in the background may use the others, and
so may the system. With ``--one-core`` the whole process is bound to one.

    python benchmarks/training_with_saves.py [--saves async] [--rounds 9] [--steps 600] [--one-core]
        [--record]

The default, async saves, takes six minutes; ``--saves sync`` as long. Each is a section of the
record. The number of steps is that of the target: each save has 50 steps to be written beside.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from judging import HEADINGS, Target, judge_statistic, paired_ratio, shown, stated
from measuring import Findings, MachineLoad, interleaved, parser_for, timed
from raw_limits import RawLimits
from torch import nn
from torch.utils.data import DataLoader
from workload import Tokens

from resumekit.adapters.torch import Checkpointer

WIDTH = 2048  # 50 MB with AdamW's moments
BATCH_SIZE = 4
SAVE_EVERY = 50
STEP_SECONDS = 0.03
TARGET = Target(1.04, min_rounds=9, is_upper_bound=True)
WARM_UP_STEPS = 2 * SAVE_EVERY
NEVER, SYNC, ASYNC = "without saves", "synchronous saves", "async saves"
SAVES: dict[str, tuple[str, dict[str, Any], Target | None]] = {
    "async": (ASYNC, {"save_every": SAVE_EVERY, "async_save": True}, TARGET),
    "sync": (SYNC, {"save_every": SAVE_EVERY}, None),
}


class Training:
    """A model and the work of one step.

    Args:
        width: of the one layer.
    """

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self._rows = torch.randn(BATCH_SIZE, width)
        self.side = 0
        self.step()
        tensors = [*self.model.parameters()]
        self.num_bytes = 3 * sum(tensor.nbytes for tensor in tensors)

    def step(self) -> None:
        """The work of one step."""
        if self.side:
            torch.mm(self._factor, self._factor)
        self.model(self._rows).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def calibrate(self, seconds: float) -> float:
        """Chooses the side of the matrices; the seconds of a step with them."""
        found = self._median()
        side = 64
        while found < seconds and side < 16384:
            self.side, self._factor = side, torch.randn(side, side)
            found = self._median()
            side = max(side + 16, int(side * min(1.5, (seconds / found) ** (1 / 3))))
        return found

    def _median(self) -> float:
        return statistics.median(timed(self.step)[0] for _ in range(15))


def train(training: Training, num_steps: int, directory: Path, options: dict[str, Any]) -> float:
    """Seconds of so many steps."""
    os.sync()
    with tempfile.TemporaryDirectory(dir=directory) as name:
        checkpointer = Checkpointer(
            Path(name, "run"),
            model=training.model,
            optimizer=training.optimizer,
            leave_on=(),
            **options,
        )
        loader = DataLoader(Tokens(num_steps + 1))
        batches = iter(checkpointer.batches(loader, epochs=1))
        next(batches)
        began = time.perf_counter()
        for _ in range(num_steps):
            training.step()
            checkpointer.step()
            next(batches)
        seconds = time.perf_counter() - began
        checkpointer.wait()
        checkpointer.__exit__(KeyboardInterrupt, None, None)  # leaves without a last save
    return seconds


def row_of(
    what: str, found: dict[str, list[float]], target: Target | None, step_seconds: float
) -> tuple[str, ...]:
    """A run with saves beside the one without of the same round."""
    without = found[NEVER]
    base = (NEVER, shown(statistics.median(without)))
    pairs = list(zip(without, found[what], strict=True))
    added = statistics.median(second - first for first, second in pairs)
    cell = f"{shown(added)}, {added / step_seconds:.1f} steps"
    median = shown(statistics.median(found[what]))
    return (what, median, *base, *judge_statistic(pairs, paired_ratio, target).cells(), cell)


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=9, has_tiny=True)
    parser.add_argument("--steps", type=int, default=600, help="of each run (default 600)")
    parser.add_argument("--saves", choices=list(SAVES), default="async", help="which are compared")
    parser.add_argument("--one-core", action="store_true", help="bind the whole process to a core")
    parser.add_argument("--directory", type=Path, help="where to write (default: here)")
    arguments = parser.parse_args()
    bound = "not bound to a core"
    if arguments.one_core:  # before any thread is started, so that all are bound
        core = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {core})
        bound = f"the whole process bound to core {core}"
    torch.set_num_threads(1)
    load = MachineLoad()
    training = Training(64 if arguments.tiny else WIDTH)
    step_seconds = training.calibrate(0.001 if arguments.tiny else STEP_SECONDS)
    saving, saving_options, target = SAVES[arguments.saves]
    runs: dict[str, dict[str, Any]] = {NEVER: {"save_every": None}, saving: saving_options}
    with tempfile.TemporaryDirectory(prefix="training-", dir=arguments.directory or ".") as name:
        directory = Path(name).absolute()
        limits = RawLimits(directory, training.num_bytes)
        contenders: dict[str, Callable[[], float]] = {
            each: partial(train, training, arguments.steps, directory, options)
            for each, options in runs.items()
        }
        contenders |= {"raw write + fsync": limits.write, "one warm copy in memory": limits.copy}
        for options in runs.values():
            train(training, min(arguments.steps, WARM_UP_STEPS), directory, options)
        found = interleaved(contenders, arguments.rounds, warms_up=False)
    megabytes = training.num_bytes / 1e6
    about = f"{arguments.steps} steps of {step_seconds * 1e3:.0f} ms, {megabytes:.0f} MB"
    Findings(
        "training-with-saves",
        heading="A training with saves beside one without",
        before=[
            f"`python benchmarks/training_with_saves.py --record`: {about},",
            f"`save_every={SAVE_EVERY}`, one thread of torch, {bound}. Pairs of a run with saves",
            "and one without, each in random order, in one process. The ratio is one plus the",
            "median paired difference, over the median run without saves; its interval is a",
            "bootstrap's over the pairs, 10 % cut off at each end: its upper end is the one-sided",
            "90 % bound that the target is about.",
        ],
        title=f"{about}, save_every={SAVE_EVERY}, {bound}, {arguments.rounds} rounds",
        headings=(*HEADINGS[:-1], "added"),
        rows=[
            *(stated(each, found[each]) for each in contenders if each not in runs),
            stated(NEVER, found[NEVER]),
            row_of(saving, found, target, step_seconds),
        ],
        packages=("torch", "numpy"),
        load=load,
        part=f"{saving}, {arguments.rounds} pairs, {bound}",
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
