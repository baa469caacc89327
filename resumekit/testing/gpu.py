"""Does a run on a GPU resume exactly? ``python -m resumekit.testing.gpu [--record FILE]``.

One row for each judgement: PASS, FAIL, or NOT RUN with the reason. Most rows train a small model
three times: uninterrupted, killed by SIGKILL, and resumed after the kill. All losses, weights and
buffers must have the same bits. A fourth run, whose resume leaves out one component, must differ.
Each launch is a process of its own, so that an error of the device ends one row only.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from resumekit.errors import CommandTimeoutError
from resumekit.record.trace import KillPoint
from resumekit.testing.cells import Cell
from resumekit.testing.kit import DEFAULT_PRELOAD, Kit, Run

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
TRAINING = Path(__file__).with_name("gpu_training.py")
CHECKS = "resumekit.testing.gpu_checks"
KILL_STEP, SECOND_KILL_STEP, KILL_INSIDE_SAVE = 13, 18, -1
TIMEOUT_SECONDS, LONG_TIMEOUT_SECONDS = 60.0, 150.0

# What a row needs: else the name of a package. With --device cpu, GPU is not needed.
GPU, STREAMS, TWO_GPUS = "a GPU", "a GPU's streams", "2 GPUs"

# By step and name.
Evidence = dict[tuple[int, str], str]


@dataclass(frozen=True)
class Row:
    """One judgement.

    Args:
        name: for ``--only``.
        options: of ``gpu_training.train`` and ``gpu_training.loop``.
        without: the component that the negative control does not restore.
        needs: ``GPU``, ``STREAMS``, ``TWO_GPUS``, or a package.
        resumed: other options of the launch after the kill.
        num_ranks: processes of one launch.
        check: a function of ``gpu_checks`` to run instead; it measures, so it runs alone.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    without: str = "optimizer"
    needs: str = GPU
    resumed: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    check: str = ""


def _optimizer_row(name: str, **options: Any) -> Row:
    needs = STREAMS if "capturable" in name else GPU
    return Row(name, {"optimizer": name, **options}, needs=needs)


def _side_row(name: str, kind: str, without: str, needs: str = GPU, **options: Any) -> Row:
    return Row(name, {"kind": kind, "width": 1 << 16, **options}, without, needs)  # 17 MB of state


def _killed_row(name: str, layout: str, num_ranks: int = 1) -> Row:
    needs = TWO_GPUS if num_ranks > 1 else GPU
    name = f"{name}, {num_ranks} ranks" if num_ranks > 1 else name
    options = {"layout": layout, "kill": KILL_INSIDE_SAVE}
    return Row(f"{name}, killed in a save", options, needs=needs, num_ranks=num_ranks)


ACROSS_DEVICES = "GPU to CPU to GPU"
SYNC: Mapping[str, Any] = {"async_save": False}
# Resumes from the first save, which allocates the memory for the copy.
FIRST_SAVE: Mapping[str, Any] = {"save_every": 10, "kill": SECOND_KILL_STEP}
DROPOUT: Mapping[str, Any] = {"dropout": 0.1}
SECOND_GPU = {"device": "cuda:1", "visible": "0,1"}
PERMUTED = {"device": "cuda:0", "visible": "1,0"}

ROWS = (
    Row("torch.compile, reduce-overhead", {"graph": "reduce-overhead", **DROPOUT}, "rng"),
    _side_row("async save, state not computed yet", "slow", "model"),
    _side_row("side stream and pending copy", "side stream", "model", STREAMS),
    _side_row("second run in a process", "second run", "optimizer"),
    _side_row("stale registration of memory", "stale", "optimizer", STREAMS, **FIRST_SAVE),
    Row("tensor formats, sync save", {"kind": "formats", **SYNC}, "model"),
    Row("tensor formats, async save", {"kind": "formats"}, "model"),
    Row("RNG, dropout", DROPOUT, "rng"),
    Row("RNG, CUDA starts after the restore", {"kind": "late"}, "rng"),
    Row("RNG, permuted devices", {**DROPOUT, **SECOND_GPU}, "rng", TWO_GPUS, PERMUTED),
    _optimizer_row("SGD"),
    _optimizer_row("fused AdamW"),
    _optimizer_row("capturable AdamW"),
    _optimizer_row("foreach AdamW"),
    _optimizer_row("NAdam"),
    Row("GradScaler, skipped steps", {"kind": "scaled"}, "grad_scaler"),
    Row("tensors in extras and variables", {}, "extras"),
    Row("workers, pinned batches", {"workers": 2}, "rng"),
    replace(_optimizer_row("capturable AdamW", graph="captured", **DROPOUT), name="CUDA graph"),
    _killed_row("FSDP2", "fsdp2"),
    _killed_row("FSDP2 with CPU offload", "fsdp2 offload"),
    _killed_row("FSDP2", "fsdp2", num_ranks=2),
    _killed_row("FSDP2 with CPU offload", "fsdp2 offload", num_ranks=2),
    _killed_row("DDP", "ddp", num_ranks=2),
    Row(ACROSS_DEVICES, {"kind": "across", **SYNC}),
    # Of several GPUs the Trainer would use all, through DataParallel.
    Row("Trainer", {"framework": "trainer", "visible": "0"}, needs="transformers"),
    Row("Lightning", {"framework": "lightning"}, needs="lightning"),
    Row("Accelerate", {"framework": "accelerate", **DROPOUT}, needs="accelerate"),
    Row("speed of saves", check="save_speed"),
    Row("stall of frozen weights", check="frozen_stall"),
    Row("memory reserved by 40 async saves", check="reserved_memory"),
    Row("machine in the journal", needs=STREAMS, check="recorded_machine"),
    Row("memory on GPU 0", check="memory_on_first_device", needs=TWO_GPUS),
)


@dataclass(frozen=True)
class Result:
    """The outcome of a row: PASS, FAIL or NOT RUN, with a figure or the reason."""

    name: str
    outcome: str
    seconds: float
    text: str


class Judge:
    """Runs one row and judges it.

    Args:
        row: the judgement.
        directory: an empty directory for it.
        device: ``cuda``, or ``cpu`` to try the rows without one.
    """

    def __init__(self, row: Row, directory: Path, device: str) -> None:
        self._row, self._device = row, device
        # Variables of a function are the user's only outside of the library and of site-packages.
        self._script = shutil.copy(TRAINING, directory)
        is_long = device == "cpu" or row.check or "graph" in row.options
        self._kit = Kit(
            directory,
            preload=(*DEFAULT_PRELOAD, "resumekit.adapters.torch"),
            cold=device != "cpu",  # a fork may not be able to use CUDA
            environment={
                "OMP_NUM_THREADS": "1",
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is deterministic only with it
                "PYTHONWARNINGS": "ignore::RuntimeWarning:runpy",  # of a cold start
                "TORCHINDUCTOR_CACHE_DIR": str(directory / "compiled"),
            },
            timeout_seconds=LONG_TIMEOUT_SECONDS if is_long else TIMEOUT_SECONDS,
        )

    def result(self) -> Result:
        """The row's outcome."""
        began = time.monotonic()
        judge = self._resume
        if self._row.check:
            judge = self._check
        elif self._row.name == ACROSS_DEVICES:
            judge = self._cross_devices
        try:
            with self._kit:
                outcome, text = PASS, judge()
        except (AssertionError, CommandTimeoutError) as error:
            outcome, text = FAIL, " ".join(str(error).split())
        return Result(self._row.name, outcome, time.monotonic() - began, text)

    def _new_run(self, *, without: str | None = None) -> Run:
        return self._kit.new_run(
            Cell(f"{self._script}:train", {}, self._row.num_ranks), inject=without
        )

    def _launch(self, run: Run, launch: str, *, kill: int = 0, **changed: Any) -> Run:
        """The run with one launch more, which is killed if it is to be."""
        options = {"device": self._device, **self._row.options, **changed, "kill": kill}
        cell = replace(run.cell, options={**options, "launch": launch})
        point = KillPoint.nowhere("SIGKILL") if kill else None
        run = self._kit.run_again(replace(run, cell=cell), kill=point)
        assert not run.failure, f"the {launch} launch failed: {run.failure.splitlines()[-1]}"
        assert not run.missed_kills, f"the {launch} launch was not killed"
        return run

    def _do(self, *launches: Callable[[], Run]) -> None:
        """Makes launches at the same time; one by one where a fork server makes them."""
        with ThreadPoolExecutor(1 if self._device == "cpu" else len(launches)) as pool:
            for future in [pool.submit(launch) for launch in launches]:
                future.result()

    def _check(self) -> str:
        run = self._kit.new_run(Cell(f"{CHECKS}:{self._row.check}", {"device": self._device}))
        run = self._kit.run_again(run)
        assert not run.failure, run.failure.splitlines()[-1]
        return (run.directory / "training" / "figure.txt").read_text()

    def _resume(self) -> str:
        """Compares a killed run, and the negative control, with one that was not killed."""
        row, kill = self._row, self._row.options.get("kill", KILL_STEP)
        reference, killed = self._new_run(), self._new_run()
        control = self._new_run(without=row.without)
        self._do(
            lambda: self._launch(reference, "reference"),
            lambda: self._launch(killed, "killed", kill=kill),
        )
        training = killed.directory / "training"
        if kill == KILL_INSIDE_SAVE:
            assert any(training.glob("run/.staging/*/state/*")), "the kill came after the save"
        shutil.copytree(training, control.directory / "training", dirs_exist_ok=True)
        self._do(
            lambda: self._launch(killed, "resumed", **row.resumed),
            lambda: self._launch(control, "control", **row.resumed),
        )
        texts = [self._compare(reference, killed, control, rank) for rank in range(row.num_ranks)]
        return texts[0]

    def _compare(self, reference: Run, killed: Run, control: Run, rank: int) -> str:
        expected, after = _read(reference, "reference", rank), _read(killed, "resumed", rank)
        different = _difference(expected, _read(killed, "killed", rank))
        assert not different, f"not reproducible: before the kill {different}"
        assert "nan" not in expected.values(), "not a number"
        step, _ = min(after)
        assert step > 0, "the launch after the kill did not resume"
        different = _difference(expected, after)
        assert not different, f"resumed at step {step}: {different}"
        missing = {key for key in expected if key[0] > step} - set(after)
        assert not missing, f"resumed at step {step}: no {min(missing)}"
        different = _difference(expected, _read(control, "control", rank))
        assert different, f"negative control: nothing differs without {self._row.without}"
        text = f"{len(after)} values equal after the resume at step {step}"
        return f"{text}; without {self._row.without}: {different.partition(':')[0]}"

    def _cross_devices(self) -> str:
        """Compares the weights before and after each change of the device."""
        run = self._launch(self._new_run(), "first", kill=KILL_STEP)
        run = self._launch(run, "second", kill=SECOND_KILL_STEP, device="cpu")
        run = self._launch(run, "third")
        steps = [0]
        launches = [_read(run, launch, 0) for launch in ("first", "second", "third")]
        for before, after in itertools.pairwise(launches):
            step, _ = min(after)
            assert step > steps[-1], "a launch did not resume"
            begun = {name: value for (at, name), value in after.items() if at == step}
            weights = {
                name: value for name, value in begun.items() if name.startswith(("0.", "4."))
            }
            different = _difference(before, {(step, name): weights[name] for name in weights})
            assert weights, "no weights were compared"
            assert not different, f"after a change of the device {different}"
            moved = {(steps[-1], name): weights[name] for name in weights}
            assert _difference(before, moved), "negative control: training changes nothing"
            steps.append(step)
        return f"weights equal at steps {steps[1]} and {steps[2]}"


def _read(run: Run, launch: str, rank: int) -> Evidence:
    path = run.directory / "training" / "evidence" / f"{launch}-rank-{rank}.txt"
    lines = (line.split("\t") for line in path.read_text().splitlines())
    return {(int(step), name): value for step, name, value in lines}


def _difference(expected: Evidence, found: Evidence) -> str:
    """The first value that differs; empty if none does."""
    for (step, name), value in sorted(found.items()):
        if expected.get((step, name)) != value:
            return f"{name} at step {step} differs: {expected.get((step, name))}, {value}"
    return ""


def missing_need(row: Row, device: str, num_gpus: int) -> str:
    """What a row needs and this machine lacks; empty if there is nothing."""
    if row.needs == TWO_GPUS and num_gpus < 2:
        return "needs 2 GPUs"
    if num_gpus == 0 and (device != "cpu" or row.needs == STREAMS):
        return "needs a GPU"
    is_known = row.needs in (GPU, STREAMS, TWO_GPUS) or find_spec(row.needs) is not None
    return "" if is_known else f"{row.needs} is not installed"


def run_rows(rows: Sequence[Row], directory: Path, *, device: str, jobs: int) -> list[Result]:
    """Runs the rows and prints each when it is done.

    Args:
        rows: those to run.
        directory: an empty directory.
        device: ``cuda`` or ``cpu``.
        jobs: rows at a time; those with a ``check`` run alone.
    """
    num_gpus = torch.cuda.device_count() if device != "cpu" else 0
    results: list[Result] = []

    def show(result: Result) -> None:
        results.append(result)
        stated = f"{result.outcome:<8}{result.seconds:6.1f} s  {result.name}: {result.text}"
        sys.stdout.write(f"{stated}\n")
        sys.stdout.flush()

    def judge(row: Row) -> Result:
        folder = Path(tempfile.mkdtemp(dir=directory))
        return Judge(row, folder, device).result()

    ready = []
    for row in rows:
        reason = missing_need(row, device, num_gpus)
        if reason:
            show(Result(row.name, NOT_RUN, 0.0, reason))
        else:
            ready.append(row)
    with ThreadPoolExecutor(jobs) as pool:
        for future in as_completed([pool.submit(judge, row) for row in ready if not row.check]):
            show(future.result())
    for row in ready:
        if row.check:
            show(judge(row))
    return results


def machine_facts() -> dict[str, str]:
    """Hardware and versions by name."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpus = ""
    if shutil.which(query[0]):
        gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    cuda: Any = torch.cuda
    cudnn: Any = torch.backends.cudnn
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "GPU, memory, driver": "; ".join(gpus.splitlines()) or "none",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(cudnn.version()),
        "NCCL": ".".join(map(str, cuda.nccl.version())) if has_nccl else "none",
        "Python": platform.python_version(),
        "system": f"{platform.platform()}, {os.cpu_count()} cores",
    }


def write_record(path: Path, facts: Sequence[str], results: Sequence[Result], summary: str) -> None:
    """Writes the facts of the machine and the results as Markdown."""
    head = ["| result | seconds | row | figure or reason |", "|---|---|---|---|"]
    rows = [f"| {r.outcome} | {r.seconds:.1f} | {r.name} | {r.text} |" for r in results]
    lines = ["# resumekit on a GPU", "", summary, "", *facts, "", *head, *rows, ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 1 if a row failed."""
    parser = argparse.ArgumentParser(
        prog="python -m resumekit.testing.gpu",
        description="Kills and resumes small trainings on the GPU, and compares every bit.",
    )
    parser.add_argument("--only", metavar="NAME", default="", help="rows whose name contains NAME")
    parser.add_argument("--jobs", type=int, default=4, help="rows at a time")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write a Markdown record")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if options.only.lower() in row.name.lower()]
    if not rows:
        parser.error(f"no row {options.only!r}; the rows are {', '.join(row.name for row in ROWS)}")
    facts = [f"- {name}: {value}" for name, value in machine_facts().items()]
    sys.stdout.write("\n".join([*facts, f"{len(rows)} rows; all take 5 minutes on one GPU", ""]))
    sys.stdout.flush()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="resumekit-gpu-") as directory:
        results = run_rows(rows, Path(directory), device=options.device, jobs=options.jobs)
    outcomes = [result.outcome for result in results]
    counts = ", ".join(f"{outcomes.count(each)} {each}" for each in (PASS, FAIL, NOT_RUN))
    summary = f"{counts}, {time.monotonic() - began:.0f} s"
    sys.stdout.write(f"{summary}\n")
    if options.record:
        write_record(options.record, facts, results, summary)
    elif FAIL in outcomes:
        sys.stdout.write("--record FILE writes a page with all of this, to attach to a report\n")
    return int(FAIL in outcomes)


if __name__ == "__main__":
    sys.exit(main())
