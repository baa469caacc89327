"""Random steps of runs under each adapter, replayed by the command as a user types it."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from resumekit.cli import main
from resumekit.storage import Store

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "integration" / "scripts"
SAVE_EVERY = 10  # of all these scripts
TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def replay(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and messages of the command, in the working directory."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["replay", *words])
    assert isinstance(ended.value.code, int)
    return (ended.value.code, *capfd.readouterr())


def content(directory: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def trained(directory: Path, name: str, *launcher: str) -> list[str]:
    """The command of a run that kept all checkpoints, in the directory ``run``."""
    text = (SCRIPTS / f"train_{name}.py").read_text(encoding="utf-8")
    kept = "directory=arguments.directory, keep_latest=None"
    text = re.sub(r"(?<!=)arguments\.directory", kept, text)
    (directory / "train.py").write_text(text)
    command = [sys.executable, *launcher, "train.py", "--directory", "run", "--epochs", "2"]
    subprocess.run(command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
    return command


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def replay_random_steps(
    command: list[str], num_ranges: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Replays random ranges of steps; all are equal, and no file changes."""
    seed = int.from_bytes(os.urandom(4), "big")
    draw, kept = random.Random(seed), sorted(name.step for name in Store(Path("run")).step_names())
    before = content(Path.cwd())
    for _ in range(num_ranges):
        first = draw.randrange(kept[0], kept[-1])
        num_steps = draw.randrange(1, min(20, kept[-1] - first) + 1)
        words = ["run", "--from", str(first), "--steps", str(num_steps), "--", *command]
        code, out, err = replay(capfd, *words)
        total = first + num_steps - max(step for step in kept if step <= first)
        assert code == 0, (seed, first, num_steps, out, err)
        assert re.search(rf"^{total} steps? replayed(, identical|: data, RNG)", out, re.M)
        assert content(Path.cwd()) == before


@pytest.mark.quick("transformers-1")
@pytest.mark.parametrize(
    ("name", "num_ranges"),
    [
        ("transformers", 1),
        *((name, 20) for name in ("torch", "accelerate", "lightning", "transformers", "deepspeed")),
    ],
)
def test_random_steps_are_identical_to_the_journal(
    name: str, num_ranges: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(name)
    replay_random_steps(trained(tmp_path, name), num_ranges, capfd)


@pytest.mark.full
@pytest.mark.parametrize("name", ["ddp", "deepspeed"])
def test_random_steps_on_two_ranks(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("deepspeed" if name == "deepspeed" else "torch")
    replay_random_steps(trained(tmp_path, name, *TWO_RANKS), 4, capfd)


@pytest.mark.full
def test_without_the_optimizer_the_trainer_takes_other_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    command = trained(tmp_path, "transformers")
    monkeypatch.setenv("RESUMEKIT_INJECT", "optimizer")
    code, out, _ = replay(capfd, "run", "--from", str(SAVE_EVERY), "--steps", "4", "--", *command)
    assert code == 1
    assert f"different from step {SAVE_EVERY + 2}: loss" in out
