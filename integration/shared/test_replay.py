"""Random steps of runs under each adapter, replayed by the command as a user types it."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resumekit.storage import Store

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "integration" / "scripts"
SAVE_EVERY = 10  # of all these scripts
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(words: list[str], directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def trained(directory: Path, name: str, *launcher: str) -> tuple[list[str], Path]:
    """The command and the run directory of a run that kept all checkpoints."""
    text = (SCRIPTS / f"train_{name}.py").read_text(encoding="utf-8")
    kept = "directory=arguments.directory, keep_latest=None"
    text = re.sub(r"(?<!=)arguments\.directory", kept, text)
    (directory / "train.py").write_text(text)
    command = [sys.executable, *launcher, "train.py", "--directory", "run", "--epochs", "2"]
    done = run(command, directory)
    assert done.returncode == 0, done.stderr
    return command, directory / "run"


def replay_random_steps(command: list[str], directory: Path, num_ranges: int) -> None:
    """Replays random ranges of steps; all are equal, and no file of the run changes."""
    seed = int.from_bytes(os.urandom(4), "big")
    draw, kept = random.Random(seed), sorted(name.step for name in Store(directory).step_names())
    before = content(directory.parent)
    for _ in range(num_ranges):
        first = draw.randrange(kept[0], kept[-1])
        num_steps = draw.randrange(1, min(20, kept[-1] - first) + 1)
        words = ["replay", "run", "--from", str(first), "--steps", str(num_steps), "--", *command]
        done = run([sys.executable, "-m", "resumekit.cli", *words], directory.parent)
        total = first + num_steps - max(step for step in kept if step <= first)
        assert done.returncode == 0, (seed, first, num_steps, done.stdout, done.stderr)
        assert re.search(rf"^{total} steps? replayed(, identical|: data, RNG)", done.stdout, re.M)
        assert content(directory.parent) == before


@pytest.mark.quick("transformers-1")
@pytest.mark.parametrize(
    ("name", "num_ranges"),
    [
        ("transformers", 1),
        *((name, 20) for name in ("torch", "accelerate", "lightning", "transformers", "deepspeed")),
    ],
)
def test_random_steps_are_identical_to_the_journal(
    name: str, num_ranges: int, tmp_path: Path
) -> None:
    pytest.importorskip(name)
    command, directory = trained(tmp_path, name)
    replay_random_steps(command, directory, num_ranges)


@pytest.mark.full
@pytest.mark.parametrize("name", ["ddp", "deepspeed"])
def test_random_steps_on_two_ranks(name: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed" if name == "deepspeed" else "torch")
    command, directory = trained(tmp_path, name, *TWO_RANKS)
    replay_random_steps(command, directory, 4)


@pytest.mark.full
def test_without_the_optimizer_the_trainer_takes_other_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    command, _ = trained(tmp_path, "transformers")
    monkeypatch.setenv("RESUMEKIT_INJECT", "optimizer")
    words = ["replay", "run", "--from", str(SAVE_EVERY), "--steps", "4", "--", *command]
    done = run([sys.executable, "-m", "resumekit.cli", *words], tmp_path)
    assert done.returncode == 1
    assert f"different from step {SAVE_EVERY + 2}: loss" in done.stdout
