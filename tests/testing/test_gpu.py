"""The checks for a GPU: what they need, what they find without one, and that they can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from resumekit.testing import gpu

ROOT = Path(__file__).resolve().parents[2]
SGD = next(row for row in gpu.ROWS if row.name == "SGD")


def run_command(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "resumekit.testing.gpu", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_without_a_gpu_each_row_is_named_and_none_runs(tmp_path: Path) -> None:
    record = tmp_path / "record.md"
    done = run_command(["--record", str(record)])
    assert done.returncode == 0, done.stderr
    *facts, summary = done.stdout.splitlines()
    facts, rows = facts[: -len(gpu.ROWS)], facts[-len(gpu.ROWS) :]
    assert f"- torch: {torch.__version__}" in facts
    assert facts[-1].startswith(f"{len(rows)} rows; ")
    assert len(rows) == len(gpu.ROWS)
    for row, line in zip(gpu.ROWS, rows, strict=True):
        reason = "needs 2 GPUs" if row.needs == gpu.TWO_GPUS else "needs a GPU"
        assert line.startswith("NOT RUN")
        assert line.endswith(f"{row.name}: {reason}")
    assert summary.startswith(f"0 PASS, 0 FAIL, {len(rows)} NOT RUN")
    text = record.read_text(encoding="utf-8")
    assert f"- torch: {torch.__version__}" in text
    assert all(row.name in text for row in gpu.ROWS)


def test_an_unknown_name_is_refused_with_the_names_of_all_rows() -> None:
    done = run_command(["--only", "no such row"])
    assert done.returncode == 2
    assert all(row.name in done.stderr for row in gpu.ROWS)


def test_a_row_that_needs_a_missing_package_is_not_run() -> None:
    row = replace(SGD, needs="no_such_package")
    assert gpu.missing_need(row, "cpu", 0) == "no_such_package is not installed"
    assert gpu.missing_need(row, "cuda", 1) == "no_such_package is not installed"
    assert gpu.missing_need(SGD, "cuda", 1) == ""
    assert gpu.missing_need(replace(SGD, needs=gpu.TWO_GPUS), "cuda", 1) == "needs 2 GPUs"
    assert gpu.missing_need(replace(SGD, needs=gpu.TWO_GPUS), "cuda", 2) == ""


def test_the_names_are_unique() -> None:
    assert len({row.name for row in gpu.ROWS}) == len(gpu.ROWS)


@pytest.mark.quick("exact", "control without effect")
@pytest.mark.parametrize(
    ("row", "outcome", "text"),
    [
        (SGD, gpu.PASS, "without optimizer"),
        # The control leaves out what this training does not use, so it proves nothing.
        (replace(SGD, without="grad_scaler"), gpu.FAIL, "nothing differs without grad_scaler"),
        (replace(SGD, resumed={"dropout": 0.5}), gpu.FAIL, "loss at step"),
        (replace(SGD, options={"width": -1}), gpu.FAIL, "launch failed: RuntimeError"),
    ],
    ids=["exact", "control without effect", "other training after the kill", "crash"],
)
def test_a_row_on_the_cpu(row: gpu.Row, outcome: str, text: str, tmp_path: Path) -> None:
    result = gpu.Judge(row, tmp_path, "cpu").result()
    assert (result.outcome, text in result.text) == (outcome, True), result
