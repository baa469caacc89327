"""What the demonstration prints about two executions of one step, and where it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resumekit.demo import _cells, _command, _loss
from resumekit.prove.workspaces import workspace_of
from resumekit.record.moments import STEP, Moment

STEP_FIELDS: dict[str, Any] = {
    "values": {"loss": (2.5).hex()},
    "samples": [7, 3, 9, 1],
    "lr": ["0x1.0p-3"],
    "epoch": 0,
    "batch": 4,
}


def _record(**changes: Any) -> Moment:
    return Moment(STEP, 5, fields={**STEP_FIELDS, **changes})


def test_equal_executions_are_called_equal() -> None:
    cells = [str(cell) for cell in _cells(_record(), _record())]
    assert cells == ["5", "0x1.4p+1", "0x1.4p+1", "7, 3, 9, …", "equal"]


@pytest.mark.parametrize(
    "change",
    [
        {"values": {"loss": (2.5000000000000004).hex()}},
        {"samples": [7, 3, 9, 2]},
        {"lr": ["0x1.1p-3"]},
        {"epoch": 1},
        {"batch": 5},
    ],
)
def test_a_difference_in_one_bit_of_one_field_is_reported(change: dict[str, Any]) -> None:
    assert str(_cells(_record(), _record(**change))[-1]) == "differs"


def test_a_step_that_the_other_run_never_trained_differs() -> None:
    assert [str(cell) for cell in _cells(None, _record())][1::3] == ["-", "differs"]


@pytest.mark.parametrize("loss", [0.0, -0.0, 1.0, 2.5, 1e-320, 0.1, float("inf"), float("nan")])
def test_the_printed_loss_keeps_every_bit(loss: float) -> None:
    assert float.fromhex(_loss({"values": {"loss": loss.hex()}})).hex() == loss.hex()


def test_the_demonstration_copies_nothing_of_where_it_is_started() -> None:
    assert workspace_of(_command(0, 1), Path("/")) is None


@pytest.mark.parametrize(
    ("device", "text"),
    [("cuda", "--device cuda: no GPU that torch can use (torch "), ("tpu", "--device: 'tpu'")],
)
def test_a_device_that_cannot_train_is_one_line(device: str, text: str) -> None:
    command = [sys.executable, "-m", "resumekit", "demo", "--device", device]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {text}")


def test_the_device_is_passed_to_the_training() -> None:
    assert _command(0, 1, "cuda")[-2:] == ["--device", "cuda"]
