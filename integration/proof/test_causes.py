"""What a resume has lost is found and named, under every framework, from random kill points.

The recorder sees the processes from outside; neither the script nor the library is asked. Each
script resumes exactly, which is the control, and then wrongly in one known way at a time.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import preloads
import pytest
from faulty_resumes import BATCHES, STATES
from recorded_runs import ROOT, RecordedRuns, Wrong, resumed_step

from resumekit.prove.causes import Cause

SCRIPTS = ROOT / "integration" / "scripts"
NUM_STEPS, EPOCH = 87, 29
NUM_KILLS = 3

PRELOADS = {
    "torch": preloads.TORCH,
    "accelerate": preloads.ACCELERATE,
    "lightning": preloads.LIGHTNING,
    "transformers": preloads.TRAINER,
    "deepspeed": preloads.DEEPSPEED,
}

# What is named for each fault. Two causes of one fault are two words for it.
CAUSES: dict[str, set[Cause]] = {
    "weights_restarted": {Cause.WEIGHTS_RESTARTED},
    "one_weight": {Cause.WEIGHTS_PARTLY},
    "older_weights": {Cause.WEIGHTS_OLDER},
    "cold_optimizer": {Cause.OPTIMIZER_COLD},
    "zero_moments": {Cause.OPTIMIZER_COLD},
    "one_group_cold": {Cause.OPTIMIZER_PARTLY},
    "older_optimizer": {Cause.OPTIMIZER_OLDER},
    "optimizer_counter": {Cause.OPTIMIZER_COUNTER},
    "weight_decay": {Cause.OPTIMIZER_SETTINGS},
    "lr_restarted": {Cause.LR_RESTARTED},
    "lr_shifted": {Cause.LR_SHIFTED},
    "other_lr": {Cause.LR_CHANGED},
    "ema_restarted": {Cause.EMA_RESTARTED},
    "buffers": {Cause.BUFFERS_LOST},
    "grad_scaler": {Cause.SCALER_RESET},
    "rng_ahead": {Cause.RNG_AHEAD},
    "rng_behind": {Cause.RNG_BEHIND},
    "rng_reseeded": {Cause.RNG_LOST},
    "variable": {Cause.UNSAVED_VARIABLE},
    "data_restarted": {Cause.DATA_RESTARTED},
    "samples_repeated": {Cause.SAMPLES_REPEATED},
    "samples_skipped": {Cause.SAMPLES_SKIPPED},
    "epoch_restarted": {Cause.EPOCH_RESTARTED},
    "other_epoch": {Cause.EPOCH_ORDER},
    "reshuffled": {Cause.ORDER_RESHUFFLED},
    "batch_order": {Cause.BATCH_ORDER},
    "batch_size": {Cause.BATCH_SIZE},
}
# These need more than one model of the scripts has.
ONLY_IN = {"buffers": {"torch-norm"}, "grad_scaler": {"torch-norm"}}
# The partitions of ZeRO are one tensor.
NOT_IN = {"one_weight": {"deepspeed"}, "one_group_cold": {"deepspeed"}}

# What is named for a component that the library leaves out, by its slot.
WITHOUT: dict[str, set[Cause]] = {
    "model": {Cause.WEIGHTS_RESTARTED},
    "optimizer": {Cause.OPTIMIZER_COLD},
    "lr_scheduler": {Cause.LR_RESTARTED},
    "grad_scaler": {Cause.SCALER_RESET},
    "ema": {Cause.EMA_RESTARTED},
    "data": {Cause.DATA_RESTARTED},
    "rng": {Cause.RNG_LOST, Cause.RNG_RESTARTED},
    "progress": {Cause.PROGRESS_LOST},
    "best_metric": {Cause.BEST_METRIC_LOST},
    "callbacks": {Cause.CALLBACKS_LOST},
    "extras": {Cause.EXTRAS_LOST},
}
# What is lost with it: the learning rate is in a param group; without a position the loop begins an
# epoch, whose order it draws.
ALSO: dict[str, set[Cause]] = {
    "optimizer": {Cause.LR_RESTARTED},
    "data": {Cause.EPOCH_RESTARTED, Cause.ORDER_RESHUFFLED, Cause.RNG_AHEAD},
}
# What the process does not show: only the library's own trace has it.
INSIDE = {"progress", "best_metric", "callbacks", "extras"}


@dataclass(frozen=True)
class Row:
    """One wrong resume and what was found."""

    framework: str
    wrong: str
    kill: int
    seen_by: str
    found: tuple[str, ...]
    expected: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        """Whether every cause that is named is the right one."""
        return bool(self.found) and set(self.found) <= set(self.expected)

    def __str__(self) -> str:
        found, expected = " + ".join(self.found) or "NOTHING", " or ".join(self.expected)
        word = "right" if self.is_right else "WRONG" if self.found else "MISSED"
        return (
            f"{self.framework:12} {self.wrong:22} {self.kill:4} {self.seen_by:8} {word:7}"
            f"{found:28} ({expected})"
        )


# A batch norm and a gradient scaler for the script.
NORMED = (
    ("nn.ReLU(), ", "nn.BatchNorm1d(64), nn.ReLU(), "),
    (
        "curriculum = {",
        "scaler = torch.amp.GradScaler('cpu', 8.0, growth_interval=7); curriculum = {",
    ),
    ("loss.backward()", "scaler.scale(loss).backward()"),
    ("optimizer.step()", "scaler.step(optimizer); scaler.update()"),
    ("        ema=ema,", "        ema=ema, grad_scaler=scaler,"),
)


def normed(script: Path, directory: Path) -> Path:
    """A copy of the script with both."""
    text = script.read_text()
    for old, new in NORMED:
        assert text.count(old) == 1
        text = text.replace(old, new)
    copy = directory / script.name
    copy.write_text(text)
    return copy


@pytest.fixture
def seed() -> int:
    """Of the kill points; a failed test prints it."""
    return int.from_bytes(os.urandom(4), "big")


def runs_of(framework: str, directory: Path) -> RecordedRuns:
    name = framework.partition("-")[0]
    pytest.importorskip(name)
    script = SCRIPTS / f"train_{name}.py"
    if framework == "torch-norm":
        script = normed(script, directory)
    (directory / "runs").mkdir()
    return RecordedRuns(directory / "runs", script, PRELOADS[name])


def kill_points(rng: random.Random) -> list[int]:
    """Random ones, resumed inside the second or the third epoch: there all faults differ.

    A script may save at the end of an epoch, too.
    """
    points = []
    for kill in range(EPOCH + 1, NUM_STEPS):
        first = (kill - 1) // EPOCH * EPOCH  # the steps before the epoch of the kill
        if first + 1 < resumed_step(kill):
            points.append(kill)
    return sorted(rng.sample(points, NUM_KILLS))


def faults_of(framework: str) -> list[str]:
    if framework == "torch-norm":
        return [name for name, only in ONLY_IN.items() if framework in only]
    return [
        name
        for name in (*STATES, *BATCHES)
        if name not in ONLY_IN and framework not in NOT_IN.get(name, ())
    ]


def judged(runs: RecordedRuns, framework: str, kill: int, wrong: Wrong) -> Iterator[Row]:
    """What is named from the records, and from the trace."""
    runs.resume(wrong)
    slot = wrong.without.partition("/")[0]
    causes = WITHOUT[slot] | ALSO.get(slot, set()) if slot else CAUSES[wrong.fault]
    views = ["records"] if slot not in INSIDE else []
    if slot:
        views.append("trace")
    for view in views:
        found = tuple(dict.fromkeys(each.cause.name for each in runs.causes(view)))
        expected = tuple(sorted(each.name for each in causes))
        yield Row(framework, wrong.fault or f"without {wrong.without}", kill, view, found, expected)


def require(rows: Sequence[Row], seed: int) -> None:
    table = "\n".join(map(str, rows))
    caught = sum(bool(row.found) for row in rows)
    right = sum(row.is_right for row in rows)
    named = len({row.found for row in rows if row.is_right})
    line = f"seed {seed}: {len(rows)} wrong resumes, {caught} caught, {right} named, {named} causes"
    print(f"\n{table}\n{line}")
    assert caught == len(rows), line
    assert right >= 0.9 * len(rows), line


def test_one_fault_is_named_and_an_exact_resume_has_none(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    fault = rng.choice(faults_of("torch"))
    with runs_of("torch", tmp_path) as runs:
        (kill, *_) = kill_points(rng)
        runs.kill(kill)
        runs.resume(Wrong())
        assert not runs.causes(), seed
        require(list(judged(runs, "torch", kill, Wrong(fault, amount=rng.randint(1, 5)))), seed)


@pytest.mark.full
@pytest.mark.parametrize("framework", [*PRELOADS, "torch-norm"])
def test_every_fault_is_named(framework: str, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows: list[Row] = []
    with runs_of(framework, tmp_path) as runs:
        every = [Wrong(fault, amount=rng.randint(1, 5)) for fault in faults_of(framework)]
        every += [Wrong(without=key) for key in runs.components()]
        rng.shuffle(every)
        for index, kill in enumerate(kill_points(rng)):
            runs.kill(kill)
            runs.resume(Wrong())
            assert not runs.causes(), (seed, kill)
            for wrong in every[index::NUM_KILLS]:
                rows += judged(runs, framework, kill, wrong)
    require(rows, seed)
