"""Checkpoints of an earlier version: they resume exactly, and the files written today are the same.

They were written by ``golden_training.py NAME DIRECTORY RECORDS --stop-after 10``, the records
without ``--stop-after``.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from preloads import ALL

from resumekit.testing import Cell, Kit
from resumekit.testing.launchers import free_port

PRELOAD = ALL

HERE = Path(__file__).parent
TRAINING = HERE / "golden_training.py"
STEP = "step-00000008"
NAMES = ("torch", "sharded", "accelerate", "transformers", "lightning", "deepspeed")
# Checkpoints of former formats, with the training that wrote each: indices of version 1, and one
# without the random state of the epoch's start.
FORMER = {"sharded-1": "sharded", "sharded-2": "sharded", "deepspeed-1": "deepspeed-1"}
NUM_RANKS = {"sharded": 2}

# Fields of a manifest that differ between two runs of one program, and prose.
VOLATILE = ("run_id", "attempt", "created", "digest", "parent")


def run_training(_: str, *, arguments: list[str]) -> None:
    """Runs the script as a command does, in this process."""
    if arguments[0].startswith("deepspeed"):  # it asks for these also in a job of one rank
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    sys.argv = [str(TRAINING), *arguments]
    runpy.run_path(str(TRAINING), run_name="__main__")


def launch(
    kit: Kit, name: str, folder: Path, *arguments: str, inject: str | None = None
) -> dict[int, Any]:
    """Runs a training, one process for each rank, until it ends; its steps."""
    records = folder / "records.jsonl"
    given = [name, str(folder / "run"), str(records), *arguments]
    cell = Cell(run_training, {"arguments": given}, NUM_RANKS.get(name, 1))
    run = kit.run_again(kit.new_run(cell, inject=inject))
    assert not run.failure, run.failure
    return steps_of(records)


def steps_of(records: Path) -> dict[int, Any]:
    """The recorded steps, by number."""
    lines = map(json.loads, records.read_text(encoding="utf-8").splitlines())
    return {each.pop("step"): each for each in lines}


def resumed(kit: Kit, name: str, folder: Path, inject: str | None = None) -> dict[int, Any]:
    """The steps of a run that begins from the stored checkpoint."""
    shutil.copytree(HERE / "checkpoints" / name / STEP, folder / "run" / STEP)
    return launch(kit, FORMER.get(name, name), folder, inject=inject)


def content_of(folder: Path) -> dict[str, Any]:
    """Every file below a checkpoint: its bytes, and of the manifest the fields that must agree."""
    files: dict[str, Any] = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = json.loads(files["manifest.json"])
    for field in VOLATILE:
        manifest.pop(field)
    manifest["fingerprint"].pop("git")
    manifest["fingerprint"].pop("versions")
    for line in (*manifest["capture"].values(), *manifest["components"]):
        line.pop("reason")
    return {**files, "manifest.json": manifest}


@pytest.mark.parametrize("name", [*NAMES, *FORMER])
def test_an_earlier_checkpoint_resumes_exactly(kit: Kit, name: str, tmp_path: Path) -> None:
    whole = steps_of(HERE / "checkpoints" / name / "records.jsonl")
    assert resumed(kit, name, tmp_path) == {step: whole[step] for step in range(9, 13)}


@pytest.mark.parametrize("component", ["rng", "optimizer", "data"])
def test_without_one_component_the_earlier_checkpoint_does_not(
    kit: Kit, component: str, tmp_path: Path
) -> None:
    whole = steps_of(HERE / "checkpoints" / "torch" / "records.jsonl")
    left_out = resumed(kit, "torch", tmp_path, component)
    assert left_out != {step: whole[step] for step in range(9, 13)}


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_those_of_the_earlier_version(kit: Kit, name: str, tmp_path: Path) -> None:
    stored = HERE / "checkpoints" / name / STEP
    versions = json.loads((stored / "manifest.json").read_text())["fingerprint"]["versions"]
    if versions["torch"].split("+")[0] != torch.__version__.split("+")[0]:
        pytest.skip(f"the stored files were written with torch {versions['torch']}")
    launch(kit, name, tmp_path, "--stop-after", "10")
    written, expected = content_of(tmp_path / "run" / STEP), content_of(stored)
    assert written.keys() == expected.keys()
    assert [path for path, content in written.items() if content != expected[path]] == []


def test_another_byte_is_noticed(tmp_path: Path) -> None:
    stored = HERE / "checkpoints" / "torch" / STEP
    shutil.copytree(stored, tmp_path / STEP)
    path = tmp_path / STEP / "model" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert content_of(tmp_path / STEP) != content_of(stored)
