"""The commands that read checkpoints, while a run in another process saves and deletes them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resumekit.cli import main

NUM_ROUNDS = 25


def _train(directory: str) -> None:
    """Saves at every step and keeps one checkpoint, until it is killed."""
    import torch

    from resumekit.adapters.torch import Checkpointer

    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(
        directory, model=model, optimizer=optimizer, save_every=1, keep_latest=1
    ) as checkpointer:
        for batch in checkpointer.batches(list(torch.ones(100_000, 1, 64)), epochs=1):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()
            time.sleep(0.02)  # a checkpoint lives longer than `diff` reads two on a slow machine


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of a run that is training."""
    directory = tmp_path_factory.mktemp("live") / "run"
    code = f"import runpy; runpy.run_path({__file__!r})['_train']({str(directory)!r})"
    log = directory.with_name("log")
    with log.open("wb") as output:
        training = subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output)
    try:
        while not list(directory.glob("step-*")):
            assert training.poll() is None, log.read_text()
            time.sleep(0.05)
        yield directory
        assert training.poll() is None, log.read_text()
    finally:
        training.kill()
        training.wait()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(each) for each in arguments])
        assert isinstance(ended.value.code, int)
        return (ended.value.code, *capsys.readouterr())

    return run


Command = Callable[..., tuple[int, str, str]]


def test_no_command_reports_damage_or_fails(run: Path, command: Command, tmp_path: Path) -> None:
    steps = set[int]()
    for number in range(NUM_ROUNDS):
        file = tmp_path / f"{number}.safetensors"
        for words in (
            ["list", "--json", run],
            ["verify", run],
            ["inspect", run],
            ["export", run, file],
            ["report", run, "-o", tmp_path / "page.html"],
            ["history", run],
            ["prune", run, "--keep-latest", 1, "--dry-run"],
        ):
            code, out, err = command(*words)
            assert (code, err) == (0, ""), (words, code, out, err)
            assert "DAMAGED" not in out
            if words[0] == "list":
                steps |= {row["step"] for row in json.loads(out)}
        code, out, err = command("diff", run, run)
        assert (code in (0, 1), err) == (True, ""), (out, err)
        assert "damaged" not in (tmp_path / "page.html").read_text().lower()
        assert file.is_file()
    assert len(steps) > NUM_ROUNDS // 2  # the run trains meanwhile


@pytest.mark.parametrize("name", ["verify", "diff", "export", "inspect"])
def test_a_checkpoint_that_the_user_named_is_not_replaced_by_another(
    run: Path, command: Command, tmp_path: Path, name: str
) -> None:
    words = {
        "verify": ["verify", run, "--step", "1"],
        "diff": ["diff", run, run, "--step", "1"],
        "export": ["export", run / "step-00000001", tmp_path / "model.safetensors"],
        "inspect": ["inspect", run / "step-00000001"],
    }[name]
    while (run / "step-00000001").exists():
        time.sleep(0.05)
    code, out, err = command(*words)
    assert (code, out) == (2, "")
    assert "no checkpoint 1" in err or "no such directory" in err
