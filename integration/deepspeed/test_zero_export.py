"""``resumekit export`` writes what DeepSpeed gathers, bit for bit, and needs no DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from preloads import DEEPSPEED

pytest.importorskip("deepspeed")

from safetensors.torch import load_file
from zero_export_workloads import through_accelerate, through_trainer
from zero_workloads import MOMENTS, NATIVE, digest_of, take_over

from resumekit.export import export_model
from resumekit.storage.store import Store
from resumekit.testing import Cell, Kit, Run

PRELOAD = DEEPSPEED

EXPORTED: tuple[dict[str, Any], ...] = (
    {"stage": 0, "tied": True},
    {"stage": 2, "frozen": True, "tied": True},
    {"stage": 3, "frozen": True, "tied": True, "precision": "bf16"},
    {"stage": 3, "precision": "fp16"},
)

# Nothing that it imports may be DeepSpeed.
WITHOUT_DEEPSPEED = """
import sys
sys.modules["deepspeed"] = None
from resumekit.cli import main
main(sys.argv[1:])
"""

IN_16_BITS: tuple[dict[str, Any], ...] = (
    {"stage": 2, "frozen": True, "precision": "bf16"},
    {"stage": 3, "frozen": True, "tied": True, "precision": "bf16"},
    {"stage": 3, "tied": True, "precision": "fp16"},
)


def exported(run: Run, file: Path, *, dtype: str = "fp32") -> dict[str, torch.Tensor]:
    """What is made of the newest checkpoint."""
    training = run.directory / "training"
    store = Store(training / "run" if (training / "run").exists() else training)
    export_model(store.open_step(store.step_names()[0]), file, dtype=dtype)
    return load_file(file)


def assert_gathered(run: Run, tensors: dict[str, torch.Tensor]) -> None:
    """They are in fp32 what DeepSpeed gathers."""
    assert {tensor.dtype for tensor in tensors.values()} <= {torch.float32, torch.int64}
    notes = json.loads((run.directory / "notes.jsonl").read_text())
    others = ("steps", "loss_scale", *(f".{moment}" for moment in MOMENTS))
    expected = {name: d for name, d in notes["saved"].items() if not name.endswith(others)}
    assert {name: digest_of(tensor) for name, tensor in tensors.items()} == expected


@pytest.mark.quick("{'stage': 3, 'precision': 'fp16'}")
@pytest.mark.parametrize("options", EXPORTED, ids=str)
def test_an_export_has_the_bits_that_deepspeed_gathers(
    kit: Kit, tmp_path: Path, options: dict[str, Any]
) -> None:
    run = kit.run_again(kit.new_run(Cell(take_over, options, 2)))
    assert not run.failure, run.failure
    assert_gathered(run, exported(run, tmp_path / "model.safetensors"))


@pytest.mark.full
def test_the_command_needs_no_deepspeed(kit: Kit, tmp_path: Path) -> None:
    run = kit.run_again(kit.new_run(Cell(take_over, {"stage": 3}, 2)))
    file = tmp_path / "model.safetensors"
    command = [sys.executable, "-c", WITHOUT_DEEPSPEED]
    command += ["export", str(run.directory / "training"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_gathered(run, load_file(file))


@pytest.mark.full
@pytest.mark.parametrize("stage", [2, 3], ids="stage {}".format)
@pytest.mark.parametrize("function", [through_accelerate, through_trainer])
def test_what_another_framework_trained_is_exported_alike(
    kit: Kit, tmp_path: Path, function: Callable[..., None], stage: int
) -> None:
    pytest.importorskip("accelerate" if function is through_accelerate else "transformers")
    run = kit.run_again(kit.new_run(Cell(function, {"stage": stage}, 2)))
    assert not run.failure, run.failure
    assert_gathered(run, exported(run, tmp_path / "model.safetensors"))


@pytest.mark.quick("{'stage': 2*")
@pytest.mark.parametrize("options", IN_16_BITS, ids=str)
def test_an_export_in_16_bits_is_the_file_that_deepspeed_writes(
    kit: Kit, tmp_path: Path, options: dict[str, Any]
) -> None:
    run = kit.run_again(kit.new_run(Cell(take_over, {**options, "native": True}, 2)))
    assert not run.failure, run.failure
    native = torch.load(run.directory / NATIVE, weights_only=True)
    as_trained = exported(run, tmp_path / "as-trained", dtype="as-trained")
    assert as_trained.keys() == native.keys()
    for name, tensor in native.items():  # a buffer is in fp32
        assert as_trained[name].dtype == tensor.dtype, name
        assert torch.equal(as_trained[name], tensor), name
    for name, tensor in exported(run, tmp_path / "lower", dtype=options["precision"]).items():
        assert tensor.element_size() == 2
        assert torch.equal(tensor, native[name].to(tensor.dtype)), name
    weights = exported(run, tmp_path / "fp32")  # what was rounded to these
    assert any(not torch.equal(weights[name], tensor.float()) for name, tensor in native.items())
