"""What do saves and loads cost on a CUDA machine, and for how long do they stall the training?

GPT-2 124M in float32 with AdamW's state on one GPU, and where there are two or more, the same model
sharded over all of them by FSDP2 with NCCL. The limits of the machine are rows of the same table:
one write past the page cache, and one copy of the state from the GPU, into pinned and into ordinary
memory; an async save that blocks about as long as the first of them copies through pinned memory.
The stall is what steps that train take longer when the first of them saves.

    python benchmarks/gpu.py [--rounds 9] [--directory DIR] [--record]

Without a CUDA device nothing is measured, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from judging import HEADINGS, Target, compared, judge, not_measured, stated
from measuring import (
    Findings,
    MachineLoad,
    cost_of,
    drop_page_cache,
    interleaved,
    parser_for,
    timed,
)
from raw_limits import RawLimits
from torch import distributed, nn
from workload import HAS_ASYNC_SAVES, SavingRun, Training, gpt2

BLOCKED_OVER_COPY = Target(1.15)
BELOW = Target(1.0, is_strict=True)
CPU_PER_GB = Target(0.4, unit=" s/GB")
SAVE_OVER_RAW = Target(1.10)
NUM_STEPS = 20  # that train, of which the first one may save
BATCH_SHAPE, TINY_BATCH_SHAPE = (8, 256), (1, 8)

WRITE, PINNED, PAGEABLE = "raw write + fsync", "copy into pinned memory", "copy into memory"
SAVE, BLOCKED, CPU = "save", "blocked by an async save", "CPU time of an async save"
TORCH, TORCH_FLUSHED = "torch.save", "torch.save + fsync"
STEPS, STEPS_SAVED = f"{NUM_STEPS} steps", f"{NUM_STEPS} steps, the first one saves"
LOAD = "load into live state, cold"
Seconds = dict[str, list[float]]


class Device:
    """A device that works asynchronously; ``cpu`` only to try this script.

    Args:
        name: ``cuda`` or ``cpu``.
    """

    def __init__(self, name: str) -> None:
        self.is_cuda = name == "cuda"
        rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.device = torch.device("cuda", rank) if self.is_cuda else torch.device("cpu")
        if self.is_cuda:
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        """Waits for the device, and for the other ranks."""
        if self.is_cuda:
            torch.cuda.synchronize()
        if distributed.is_initialized():
            distributed.barrier()

    def timed(self, call: Callable[[], Any]) -> float:
        """Seconds until the device has done it as well."""
        self.synchronize()

        def wait() -> None:
            call()
            self.synchronize()

        return timed(wait)[0]


class Contenders:
    """All that is measured on one device, or on one rank's.

    Args:
        training: on the device, sharded or not.
        device: that one.
        directory: where it writes; the same for all ranks.
        batch_shape: of the tokens of a step that trains.
    """

    def __init__(
        self, training: Training, device: Device, directory: Path, batch_shape: tuple[int, int]
    ) -> None:
        self.training, self.device, self._directory = training, device, directory
        self._tokens = torch.randint(256, batch_shape, device=device.device)
        self._run = SavingRun(directory / "sync", training, keep_latest=2)
        self._async: SavingRun | None = None
        if HAS_ASYNC_SAVES:
            options: dict[str, Any] = {"async_save": True}
            self._async = SavingRun(directory / "async", training, keep_latest=2, **options)
        for _ in range(2):
            self._run.save()
        self._run.finish()
        self.num_bytes = self._run.num_bytes()
        self.cpu_per_gb: list[float] = []

    def shared(self) -> dict[str, Callable[[], float]]:
        """What all ranks measure together."""
        found: dict[str, Callable[[], float]] = {
            SAVE: self.save,
            STEPS: partial(self.train, saves=False),
        }
        if self._async is not None:
            found |= {BLOCKED: self.save_async, STEPS_SAVED: partial(self.train, saves=True)}
        return found

    def alone(self) -> dict[str, Callable[[], float]]:
        """What one process measures, with the limits of the machine."""
        num_bytes = self.training.num_bytes()
        source = torch.zeros(num_bytes // 4, device=self.device.device)
        pageable = torch.zeros(num_bytes // 4)
        pinned = torch.zeros(num_bytes // 4, pin_memory=self.device.is_cuda)
        return {
            WRITE: RawLimits(self._directory, self.num_bytes).write,
            PINNED: lambda: self.device.timed(lambda: pinned.copy_(source, non_blocking=True)),
            PAGEABLE: lambda: self.device.timed(lambda: pageable.copy_(source)),
            TORCH: partial(self.save_by_torch, is_flushed=False),
            TORCH_FLUSHED: partial(self.save_by_torch, is_flushed=True),
            LOAD: self.load,
        }

    def save(self) -> float:
        """Ours, durable; an old one is deleted."""
        os.sync()
        seconds = self.device.timed(self._run.save)
        self._run.finish()
        return seconds

    def save_async(self) -> float:
        """For how long ours blocks; its CPU time until it is durable is kept."""
        assert self._async is not None
        run, blocked = self._async, 0.0
        os.sync()

        def save() -> None:
            nonlocal blocked
            blocked = self.device.timed(run.save)
            run.checkpointer.wait()

        self.cpu_per_gb.append(cost_of(save).cpu_seconds / (self.num_bytes / 1e9))
        run.finish()
        return blocked

    def train(self, *, saves: bool) -> float:
        """Steps that train, the first of which may save without waiting for it."""
        run = self._async or self._run

        def steps() -> None:
            for number in range(NUM_STEPS):
                self.training.model(input_ids=self._tokens, labels=self._tokens).loss.backward()
                self.training.optimizer.step()
                self.training.optimizer.zero_grad()
                run.end_step(saves=saves and number == 0)

        seconds = self.device.timed(steps)
        run.finish()
        return seconds

    def save_by_torch(self, *, is_flushed: bool) -> float:
        """One file, of the state as it is on the device."""
        path = self._directory / "torch.pt"
        path.unlink(missing_ok=True)
        os.sync()

        def save() -> None:
            with path.open("wb") as file:
                torch.save(self.training.state_dict(), file)
                if is_flushed:
                    file.flush()
                    os.fsync(file.fileno())

        return self.device.timed(save)

    def load(self) -> float:
        """All of a start up to the first batch, every byte verified, nothing in the page cache."""
        directory = self._directory / "load"
        if not directory.exists():
            first = SavingRun(directory, self.training)
            first.save()
            first.leave()
        drop_page_cache(directory)
        runs: list[SavingRun] = []
        seconds = self.device.timed(lambda: runs.append(SavingRun(directory, self.training)))
        runs[0].leave()
        return seconds

    def leave(self) -> None:
        """Closes all runs."""
        for run in (self._run, self._async):
            if run is not None:
                run.leave()


def sharded(model: nn.Module) -> nn.Module:
    """By FSDP2, each block and the rest."""
    from torch.distributed.fsdp import fully_shard

    for block in model.transformer.h:  # type: ignore[union-attr, operator]
        fully_shard(block)
    fully_shard(model)
    return model


def rank_main(directory: Path, device_name: str, num_rounds: int, *, tiny: bool) -> None:
    """One rank of FSDP2: rank 0 writes what it found."""
    device = Device(device_name)
    distributed.init_process_group("nccl" if device.is_cuda else "gloo")
    model = sharded(gpt2(tiny=tiny).to(device.device))
    shape = TINY_BATCH_SHAPE if tiny else BATCH_SHAPE
    contenders = Contenders(Training.of(model), device, directory, shape)
    seconds = interleaved(contenders.shared(), num_rounds)
    contenders.leave()
    if distributed.get_rank() == 0:
        found = {"seconds": seconds, "bytes": contenders.num_bytes}
        (directory / "found.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def measure_ranks(arguments: argparse.Namespace, num_ranks: int, directory: Path) -> dict[str, Any]:
    """What so many ranks found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={num_ranks}", __file__, "--rank-of", str(directory)]
    command += ["--device", arguments.device, "--rounds", str(arguments.rounds)]
    command += ["--tiny"] * arguments.tiny
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found: dict[str, Any] = json.loads((directory / "found.json").read_text())
    return found


def stall_rows(seconds: Seconds) -> list[tuple[str, ...]]:
    """The steps with a save beside those without, and the difference."""
    steps, saved = seconds[STEPS], seconds.get(STEPS_SAVED, [])
    row = compared(STEPS_SAVED, saved, STEPS, steps, None)
    if not saved:
        return [row]
    stalls = [second - first for first, second in zip(steps, saved, strict=True)]
    return [row, stated("stall of these steps", stalls)]


def rows_of(seconds: Seconds, cpu_per_gb: list[float]) -> list[tuple[str, ...]]:
    """Of one GPU."""
    ours = seconds.get(BLOCKED, [])
    judgement = judge(cpu_per_gb, CPU_PER_GB) if cpu_per_gb else not_measured(CPU_PER_GB)
    return [
        *(stated(name, seconds[name]) for name in (WRITE, PINNED, PAGEABLE, TORCH)),
        compared(TORCH_FLUSHED, seconds[TORCH_FLUSHED], WRITE, seconds[WRITE], None),
        compared(SAVE, seconds[SAVE], WRITE, seconds[WRITE], SAVE_OVER_RAW),
        compared(SAVE, seconds[SAVE], TORCH_FLUSHED, seconds[TORCH_FLUSHED], BELOW),
        compared(BLOCKED, ours, PINNED, seconds[PINNED], BLOCKED_OVER_COPY),
        compared(BLOCKED, ours, PAGEABLE, seconds[PAGEABLE], None),
        compared(BLOCKED, ours, TORCH, seconds[TORCH], BELOW),
        (CPU, "", "", "", *judgement.cells(), ""),
        *stall_rows(seconds),
        stated(LOAD, seconds[LOAD]),
    ]


def main() -> None:
    """Measures and prints."""
    parser = parser_for(__doc__, rounds=9, has_tiny=True)
    parser.add_argument("--directory", type=Path, help="where to write (default: here)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_main(arguments.rank_of, arguments.device, arguments.rounds, tiny=arguments.tiny)
        return
    is_cuda = arguments.device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        print("no CUDA device: nothing was measured")
        return
    load = MachineLoad()
    device = Device(arguments.device)
    num_ranks = torch.cuda.device_count() if is_cuda else 2
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=arguments.directory or ".") as name:
        directory = Path(name).absolute()
        training = Training.of(gpt2(tiny=arguments.tiny).to(device.device))
        shape = TINY_BATCH_SHAPE if arguments.tiny else BATCH_SHAPE
        contenders = Contenders(training, device, directory, shape)
        seconds = interleaved({**contenders.shared(), **contenders.alone()}, arguments.rounds)
        contenders.leave()
        one = "1 GPU" if is_cuda else "the CPU, to try the script"
        rows = [(one, *row[:-1]) for row in rows_of(seconds, contenders.cpu_per_gb[1:])]
        if num_ranks > 1:
            (directory / "ranks").mkdir()
            found = measure_ranks(arguments, num_ranks, directory / "ranks")["seconds"]
            title = f"{num_ranks} ranks, FSDP2, {'NCCL' if is_cuda else 'gloo'}"
            several = [
                stated(SAVE, found[SAVE]),
                compared(BLOCKED, found.get(BLOCKED, []), SAVE, found[SAVE], None),
                *stall_rows(found),
            ]
            rows += [(title, *row[:-1]) for row in several]
    name = torch.cuda.get_device_name() if is_cuda else "none"
    Findings(
        "gpu",
        heading="Saves and loads on a GPU",
        before=[
            f"`python benchmarks/gpu.py --record`: GPU: {name}, {num_ranks if is_cuda else 0} of",
            f"them; GPT-2 124M in float32 with AdamW, {contenders.num_bytes / 1e9:.2f} GB.",
            f"{arguments.rounds} rounds, each in random order; a ratio is the median of the",
            "rounds' ratios, its interval a bootstrap's over the rounds. Clocks are read when the",
            "GPU has done its work. With several ranks rank 0's clock is read after a barrier.",
        ],
        title=f"GPT-2 124M with AdamW on {name}, {arguments.rounds} rounds",
        headings=("on", *HEADINGS[:-1]),
        rows=rows,
        packages=("torch", "numpy", "transformers"),
        load=load,
    ).publish(arguments.record)


if __name__ == "__main__":
    main()
