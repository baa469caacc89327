"""How long do a save and a load of a real training state take, beside the limits of this machine?

GPT-2 124M in float32 with AdamW's state, 1.49 GB, under the adapter for plain torch. Every round
measures all contenders in a random order on the same disk, so that the ratios hold on a machine
whose load changes. Compared with one another:

* the machine: one write past the page cache with an fsync, one read past it, one copy in memory;
* save: from the end of a step to the next batch, the checkpoint durable and digested, with and
  without an old one to delete; by ``torch.save``, and by ``torch.save`` and an ``fsync``;
* async save: for how long it blocks, its CPU time, and when it is durable;
* load: all of a start up to the first batch, every byte verified, the file not in the page cache,
  in a fresh process: into an optimizer without state, as after a restart, and into one that has it.

    python benchmarks/save_load.py [--rounds 9] [--directory DIR] [--record]
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from judging import HEADINGS, Target, Verdict, compared, judge, not_measured, shown, stated
from measuring import (
    Cost,
    Findings,
    MachineLoad,
    bytes_of,
    cost_of,
    drop_page_cache,
    in_fresh_process,
    interleaved,
    parser_for,
    timed,
)
from raw_limits import RawLimits, huge_memory
from workload import HAS_ASYNC_SAVES, SavingRun, Training, gpt2

SAVE_OVER_RAW = Target(1.10)
SAVE_OVER_TORCH = Target(0.40)
RAW_SHARE_FOR_THAT = 0.36
BLOCKED_OVER_COPY = Target(1.15)
BELOW = Target(1.0, is_strict=True)
CPU_PER_GB = Target(0.4, unit=" s/GB")
LOAD_THROUGH_BUFFER = Target(1.25)
LOAD_THROUGH_RING = Target(2.2)

# The contenders, by their names in the table.
WRITE, READ, COPY = "raw write + fsync", "raw read, cold", "one warm copy in memory"
SAVE, SAVE_ONLY = "save, an old one deleted", "save, nothing deleted"
BLOCKED, DURABLE = "blocked by an async save", "async save until durable"
TORCH, TORCH_FLUSHED = "torch.save", "torch.save + fsync"
LOAD, LOAD_LIVE = "load after a restart", "load into live state"
ASYNC = {"async_save": True}

# What a child loads by: "torch", or ours with these options; into which optimizer.
LOADS: dict[str, tuple[str, bool]] = {
    f"{LOAD}, without the buffer": ("ring", False),
    f"{LOAD_LIVE}, without the buffer": ("ring", True),
    f"{LOAD}, through the buffer": ("buffer", False),
    f"{LOAD_LIVE}, through the buffer": ("buffer", True),
    "torch.load after a restart": ("torch", False),
    "torch.load into live state": ("torch", True),
}


def is_built(way: str) -> bool:
    """Whether there is this way to load."""
    return way != "buffer" or HAS_ASYNC_SAVES


class Savers:
    """All that saves, each into a directory of its own."""

    def __init__(self, training: Training, directory: Path) -> None:
        self.training = training
        self._directory = directory
        self._retaining = SavingRun(directory / "retaining", training, keep_latest=2)
        self._keeping = SavingRun(directory / "keeping", training, keep_latest=None)
        self._async: SavingRun | None = None
        self._snapshot_bytes = 0
        if HAS_ASYNC_SAVES:
            self._snapshot_bytes = cost_of(self._begin_async_saves).kept_bytes
        for _ in range(2):  # from now on, each save has an old one to delete
            self._retaining.save()
        self._retaining.finish()

    def _begin_async_saves(self) -> None:
        """From the first one on, a copy of the state stays in memory."""
        options: dict[str, Any] = ASYNC
        self._async = SavingRun(self._directory / "async", self.training, keep_latest=2, **options)
        for _ in range(2):
            self._async.save()
        self._async.finish()

    @property
    def num_bytes(self) -> int:
        """Of one of our checkpoints."""
        return self._retaining.num_bytes()

    def contenders(self) -> dict[str, Callable[[], Cost]]:
        """What is measured, by name."""
        found: dict[str, Callable[[], Cost]] = {
            SAVE: self.save,
            SAVE_ONLY: self.save_only,
            TORCH: partial(self.save_by_torch, is_flushed=False),
            TORCH_FLUSHED: partial(self.save_by_torch, is_flushed=True),
        }
        return found if self._async is None else {**found, BLOCKED: self.save_async}

    def save(self) -> Cost:
        """Ours."""
        os.sync()
        cost = cost_of(self._retaining.save)
        self._retaining.finish()
        return cost

    def save_only(self) -> Cost:
        """Ours; the one before is removed when nobody looks."""
        os.sync()
        before = self._keeping.newest() if self._keeping.has_saved() else None
        cost = cost_of(self._keeping.save)
        self._keeping.finish()
        if before is not None:
            shutil.rmtree(before)
        os.sync()
        return cost

    def save_async(self) -> Cost:
        """Ours; ``seconds`` are those that it blocks, all else is up to the commit."""
        assert self._async is not None
        os.sync()
        blocked: list[float] = []

        def save(run: SavingRun) -> None:
            blocked.append(timed(run.save)[0])
            run.checkpointer.wait()

        whole = cost_of(partial(save, self._async))
        self._async.finish()
        return replace(
            whole,
            seconds=blocked[0],
            durable_seconds=whole.seconds,
            kept_bytes=self._snapshot_bytes,
        )

    def save_by_torch(self, *, is_flushed: bool) -> Cost:
        """One file; the one before is removed when nobody looks."""
        path = self._directory / "torch.pt"
        path.unlink(missing_ok=True)
        os.sync()
        cost = cost_of(partial(torch_save, self.training, path, is_flushed=is_flushed))
        path.unlink()
        os.sync()
        return cost

    def leave(self) -> None:
        """Closes all runs."""
        for run in (self._retaining, self._keeping, self._async):
            if run is not None:
                run.leave()


def torch_save(training: Training, path: Path, *, is_flushed: bool) -> None:
    """One file, durable where asked for."""
    with path.open("wb") as file:
        torch.save(training.state_dict(), file)
        if is_flushed:
            file.flush()
            os.fsync(file.fileno())


# Loads: each in a process of its own


def load(way: str, directory: Path, expected: str, *, has_moments: bool, tiny: bool) -> Cost:
    """One load by a fresh process.

    Raises:
        SystemExit: it did not give back what was saved.
    """
    cost, digest = in_fresh_process(
        load_child, way, directory, has_moments, tiny, preload=("workload",)
    )
    if digest != expected:
        raise SystemExit(f"the load by way of {way} did not give back what was saved")
    return cost


def load_child(way: str, directory: Path, has_moments: bool, tiny: bool) -> tuple[Cost, str]:
    """What a load costs in this process, and the digest of what came."""
    training = Training.of(gpt2(tiny=tiny), has_moments=has_moments)
    # A virtual machine gives free memory back to its host, and waits seconds until it has it again.
    huge_memory(bytes_of(directory))
    drop_page_cache(directory, whole=False)
    runs: list[SavingRun] = []

    def load() -> None:
        if way == "torch":
            training.load_state_dict(torch.load(directory / "torch.pt", weights_only=True))
        else:
            options = ASYNC if way == "buffer" else {}
            runs.append(SavingRun(directory / "run", training, **options))

    available = {"ring": 0, "buffer": 1 << 50}.get(way)
    with patch("resumekit.run.saving.snapshot.available_memory", return_value=available):
        cost = cost_of(load)
    digest = training.digest()
    for run in runs:
        run.leave()
    return cost, digest


def measure(directory: Path, num_rounds: int, *, tiny: bool) -> tuple[dict[str, list[Cost]], int]:
    """All contenders, and the bytes of one of our checkpoints."""
    training = Training.of(gpt2(tiny=tiny))
    saved = directory / "saved"
    saved.mkdir()
    run = SavingRun(saved / "run", training)
    run.save()
    run.leave()
    torch_save(training, saved / "torch.pt", is_flushed=True)
    expected = training.digest()
    savers = Savers(training, directory)
    limits = RawLimits(directory, savers.num_bytes)
    contenders = savers.contenders()
    read = partial(limits.read, saved / "run")
    for name, call in ((WRITE, limits.write), (READ, read), (COPY, limits.copy)):
        contenders[name] = partial(_only_seconds, call)
    for name, (way, has_moments) in LOADS.items():
        if is_built(way):
            contenders[name] = partial(
                load, way, saved, expected, has_moments=has_moments, tiny=tiny
            )
    costs = interleaved(contenders, num_rounds)
    savers.leave()
    return costs, savers.num_bytes


def _only_seconds(call: Callable[[], float]) -> Cost:
    return Cost(call(), 0, 0, 0)


# The table


def rows_of(costs: dict[str, list[Cost]], num_bytes: int) -> list[tuple[str, ...]]:
    """The limits, then each figure beside its target."""
    seconds = {name: [cost.seconds for cost in found] for name, found in costs.items()}

    def row(name: str, against: str, target: Target | None) -> tuple[str, ...]:
        memory = memory_of(costs.get(name, []), is_kept=name == BLOCKED)
        return compared(
            name, seconds.get(name, []), against, seconds[against], target, memory=memory
        )

    rows = [stated(name, seconds[name]) for name in (WRITE, READ, COPY)]
    rows += [stated(TORCH, seconds[TORCH], memory=memory_of(costs[TORCH]))]
    rows += [row(TORCH_FLUSHED, WRITE, None), row(WRITE, TORCH_FLUSHED, None)]
    rows += [row(name, WRITE, SAVE_OVER_RAW) for name in (SAVE, SAVE_ONLY)]
    rows += [compared_with_torch(name, seconds) for name in (SAVE, SAVE_ONLY)]
    rows += [row(BLOCKED, COPY, BLOCKED_OVER_COPY), row(BLOCKED, TORCH, BELOW)]
    rows += async_rows(costs, seconds[WRITE], num_bytes)
    seconds["raw read + one copy"] = [
        read + copy for read, copy in zip(seconds[READ], seconds[COPY], strict=True)
    ]
    for name, (way, _) in LOADS.items():
        if way == "buffer":
            rows.append(row(name, "raw read + one copy", LOAD_THROUGH_BUFFER))
        else:
            rows.append(row(name, READ, LOAD_THROUGH_RING if way == "ring" else None))
    return rows


def compared_with_torch(name: str, seconds: dict[str, list[float]]) -> tuple[str, ...]:
    """A save compared with torch.save + fsync; the target holds where the disk is much faster."""
    ratios = zip(seconds[WRITE], seconds[TORCH_FLUSHED], strict=True)
    share = statistics.median(raw / flushed for raw, flushed in ratios)
    row = compared(name, seconds[name], TORCH_FLUSHED, seconds[TORCH_FLUSHED], SAVE_OVER_TORCH)
    return row if share < RAW_SHARE_FOR_THAT else (*row[:7], Verdict.DOES_NOT_APPLY.value, *row[8:])


def async_rows(
    costs: dict[str, list[Cost]], raw: Sequence[float], num_bytes: int
) -> list[tuple[str, ...]]:
    """The CPU time of an async save, and how long it takes to be durable."""
    found = costs.get(BLOCKED, [])
    rows = [compared(DURABLE, [cost.durable_seconds for cost in found], WRITE, raw, None)]
    per_gb = [cost.cpu_seconds / (num_bytes / 1e9) for cost in found]
    judgement = judge(per_gb, CPU_PER_GB) if per_gb else not_measured(CPU_PER_GB)
    median = shown(statistics.median(cost.cpu_seconds for cost in found)) if found else ""
    rows.append(("CPU time of an async save", median, "", "", *judgement.cells(), ""))
    cpu = [cost.cpu_seconds / (num_bytes / 1e9) for cost in costs[SAVE]]
    median = shown(statistics.median(cost.cpu_seconds for cost in costs[SAVE]))
    about = f"{statistics.median(cpu):.2f} s/GB"
    rows.append(("CPU time of a save", median, "", "", about, "", "", "", ""))
    return rows


def memory_of(costs: Sequence[Cost], *, is_kept: bool = False) -> str:
    """The most that was needed in any round; where asked for, with what stays between saves."""
    if not costs:
        return ""
    extra = f"{max(cost.extra_bytes for cost in costs) / 1e6:.0f} MB"
    return f"{extra}, keeps {costs[0].kept_bytes / 1e6:.0f} MB" if is_kept else extra


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=9, has_tiny=True)
    parser.add_argument("--directory", type=Path, help="where to write (default: here)")
    arguments = parser.parse_args()
    tiny = arguments.tiny
    machine_load = MachineLoad()
    with tempfile.TemporaryDirectory(prefix="save-load-", dir=arguments.directory or ".") as name:
        costs, num_bytes = measure(Path(name).absolute(), arguments.rounds, tiny=tiny)
    Findings(
        "save-load",
        heading="Save and load beside the limits of the machine",
        before=[
            "`python benchmarks/save_load.py --record`: GPT-2 124M in float32 with AdamW under",
            f"the adapter for plain torch, {num_bytes / 1e9:.2f} GB. {arguments.rounds} rounds,",
            "each in random order; a ratio is the median of the rounds' ratios, its interval a",
            "bootstrap's over the rounds. Saves: from the end of a step to the next batch.",
            "Loads: all of a start up to the first batch, in a fresh process, the file not in",
            "the page cache. The raw rows use no code of resumekit: O_DIRECT from and into huge",
            "pages, the read from the files that are loaded; the copy goes from ordinary memory",
            "into huge pages, by torch or numpy,",
            f"whichever is faster, {torch.get_num_threads()} threads of torch. Extra memory is the",
            "peak above what is resident before and after, the most of all rounds; what async",
            "saves keep is by how much the first two of them make the process larger.",
        ],
        title=f"GPT-2 124M with AdamW, {num_bytes / 1e9:.2f} GB, {arguments.rounds} rounds",
        headings=HEADINGS,
        rows=rows_of(costs, num_bytes),
        packages=("torch", "numpy", "transformers"),
        load=machine_load,
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
