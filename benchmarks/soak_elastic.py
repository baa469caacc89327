"""The kind ``elastic`` of the soak: each relaunch has another number of ranks.

``resumekit prove`` launches one command, so this launches and judges by itself, and asks nothing
of the library: the samples of each step are in the ledgers that the ranks write, the weights in a
file at the end. Both are compared with an uninterrupted run of two ranks. The sums over one rank
and over two are rounded in another order, so the weights need not have the same bits; the training
is in float64, in which that makes a small difference. The control leaves the position in the data
out of one resume, and must be seen in both.
"""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file

from resumekit.launcher.processes import Launch, tail_of
from resumekit.record.trace import INJECT_VARIABLE

TRAINING = Path(__file__).with_name("soak_training.py")
WORLDS = (2, 1)
NUM_STEPS = 336
TOLERANCE = 1e-9  # of a weight, relative to the largest one
_MARKER = "SOAK_OF"
_TIMEOUT_SECONDS = 600.0
_LONGEST_DELAY_SECONDS = 0.1  # several steps and a save


class ElasticResult(NamedTuple):
    """What was found.

    Args:
        num_kills: of the killed run.
        num_resumes: launches that began behind step 0.
        num_steps: of the uninterrupted run.
        failure: of a launch that ended by itself; empty if none failed.
        has_equal_ledger: of each step, over all ranks.
        difference: the largest one of a weight, relative to the largest weight.
        control: what the control has: an equal ledger, and the difference.
    """

    num_kills: int
    num_resumes: int
    num_steps: int
    failure: str
    has_equal_ledger: bool
    difference: float
    control: tuple[bool, float]

    @property
    def verdict(self) -> str:
        """Of the weights, where the control was seen."""
        if self.failure:
            return self.failure
        if self.control[0] or self.control[1] <= TOLERANCE:
            return "the control was not seen"
        is_equal = self.difference <= TOLERANCE
        return f"equal within {TOLERANCE:g}" if is_equal else "other weights"

    @property
    def notes(self) -> str:
        """The figures."""
        control = "another ledger" if not self.control[0] else "THE SAME LEDGER"
        return (
            f"largest difference of a weight {self.difference:.0e}; control without the position "
            f"in the data: {control}, {self.control[1]:.0e}"
        )


def soak_elastic(num_kills: int, seed: int, kept: Path) -> ElasticResult:
    """Kills a training of one and two ranks in turn, and judges it."""
    chosen = random.Random(seed)
    reference, control, killed = (kept / name for name in ("reference", "control", "killed"))
    failure = _run(reference, [], chosen)
    failure = failure or _run(control, [NUM_STEPS // 2], chosen, {INJECT_VARIABLE: "data"})
    kills = sorted(chosen.sample(range(6, NUM_STEPS - 5), num_kills))
    failure = failure or _run(killed, kills, chosen)
    if failure:
        return ElasticResult(0, 0, 0, failure, False, float("inf"), (False, float("inf")))
    firsts = [_steps_of(path)[0] for path in sorted(killed.glob("ledger-*-0.txt"))]
    expected = ledger_of(reference)
    is_whole = list(expected) == list(range(NUM_STEPS))
    return ElasticResult(
        num_kills=len(list(killed.glob("log-*.txt"))) - 1,
        num_resumes=sum(first > 0 for first in firsts),
        num_steps=len(expected),
        failure="",
        has_equal_ledger=is_whole and ledger_of(killed) == expected,
        difference=_difference(killed, reference),
        control=(ledger_of(control) == expected, _difference(control, reference)),
    )


def _run(
    directory: Path,
    kills: Sequence[int],
    chosen: random.Random,
    relaunch_environment: dict[str, str] | None = None,
) -> str:
    """Launches until a launch ends by itself; why it has failed, else nothing.

    Args:
        directory: of the run; absent.
        kills: one launch is killed once it has begun and come to each of these steps.
        chosen: how much later.
        relaunch_environment: of the launches after the first.
    """
    directory.mkdir(parents=True)
    for number, step in enumerate([*kills, None]):
        world, log = WORLDS[number % len(WORLDS)], directory / f"log-{number:03d}.txt"
        environment = {**os.environ, _MARKER: uuid.uuid4().hex, "SOAK_LAUNCH": f"{number:03d}"}
        environment |= (relaunch_environment or {}) if number else {}
        launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={world}")
        command = [sys.executable, "-m", *launcher, str(TRAINING), "elastic", str(directory)]
        launch = Launch(command, environment, marker=_MARKER, log=log)
        try:
            if not _has_come_to(step, launch, directory / f"ledger-{number:03d}-0.txt"):
                return "" if launch.poll() == 0 else f"failed: {' '.join(tail_of(log).split())}"
            time.sleep(chosen.uniform(0, _LONGEST_DELAY_SECONDS))
        finally:
            launch.kill_all()
        print(f"launch {number} of {world} ranks: killed after step {step}", flush=True)
    raise AssertionError("the last launch is never killed")


def _has_come_to(step: int | None, launch: Launch, ledger: Path) -> bool:
    """Waits until a launch is at a step; False once it has ended."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while launch.poll() is None:
        if step is not None and max(_steps_of(ledger), default=-1) >= step:
            return True
        if time.monotonic() > deadline:
            raise TimeoutError(f"{ledger}: not at step {step}: {launch.log_tail()}")
        time.sleep(0.01)
    return False


def _steps_of(ledger: Path) -> list[int]:
    text = ledger.read_text() if ledger.exists() else ""
    return [int(line.partition(":")[0]) for line in text.splitlines() if ":" in line]


def ledger_of(run: Path) -> dict[int, list[str]]:
    """The samples of each step on all ranks, as the last launch that came to it trained them."""
    found: dict[int, dict[str, list[str]]] = {}
    for path in run.glob("ledger-*.txt"):
        launch = path.name.split("-")[1]
        for line in path.read_text().splitlines():
            step, _, samples = line.partition(": ")
            found.setdefault(int(step), {}).setdefault(launch, []).extend(samples.split())
    return {step: sorted(found[step][max(found[step])]) for step in sorted(found)}


def _difference(run: Path, reference: Path) -> float:
    weights, expected = (load_file(each / "weights.safetensors") for each in (run, reference))
    largest = max(float(each.abs().max()) for each in expected.values())
    found = (float((weights[name] - each).abs().max()) for name, each in expected.items())
    return max(found) / largest
