"""``doctor``: what it finds in the first steps, and that it leaves the files as they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from resumekit.cli import main

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from resumekit.adapters.torch import Checkpointer

class Ones:
    count = 0

    def __next__(self):
        self.count += 1
        return 1.0


torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=4, shuffle=True)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
ckpt = Checkpointer("runs/a", model=model, optimizer=optimizer)
numbers = HOLDER
for (batch,) in ckpt.batches(loader, epochs=2):
    open("log.txt", "a").write("a step\\n")
    if "fails" in sys.argv:
        raise RuntimeError("no data")
    loss = model(batch).square().mean() * next(numbers)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step(loss=loss)
"""
EXACT = "Ones()"
UNKNOWN = "(1.0 for _ in range(100))"  # a generator, whose position nothing can read
Doctor = Callable[..., tuple[int, str]]

TRAINED_ELSEWHERE = """
import torch

model = torch.nn.Linear(4, 4)
for _ in range(5):
    model(torch.randn(4)).sum().backward()
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Examines a script in this process: exit code, and stdout or, of an error, stderr."""

    def run(script: str, *options: str, argument: str = "trains") -> tuple[int, str]:
        Path("train.py").write_text(script)
        with pytest.raises(SystemExit) as ended:
            main(["doctor", *options, "--", sys.executable, "train.py", argument])
        assert isinstance(ended.value.code, int)
        out, err = capsys.readouterr()
        return ended.value.code, out or err

    return run


@pytest.mark.quick("unknown")
@pytest.mark.parametrize(("holder", "status"), [(EXACT, 0), (UNKNOWN, 1)], ids=["exact", "unknown"])
def test_what_is_saved_and_lost_is_said_before_a_run_begins(
    holder: str, status: int, directory: Path, doctor: Doctor
) -> None:
    found, text = doctor(SCRIPT.replace("HOLDER", holder))
    assert found == status, text
    lines = text.splitlines()
    (exact,) = (line for line in lines if line.startswith("exact: "))
    assert {"model", "optimizer", "data", "rng"} < set(exact.removeprefix("exact: ").split(", "))
    unknown = [line for line in lines if line.startswith("unknown: ")]
    assert len(unknown) == status
    assert all("train.py:<module>.numbers" in line for line in unknown)
    assert any(line.startswith("not in this training: lr_scheduler") for line in lines)
    assert {path.name for path in directory.iterdir()} == {"train.py"}


def test_the_same_as_json(doctor: Doctor) -> None:
    status, text = doctor(SCRIPT.replace("HOLDER", UNKNOWN), "--json", "--steps", "4")
    assert status == 1
    found = json.loads(text)
    assert found["capture"]["train.py:<module>.numbers"][0] == "unknown"
    assert found["capture"]["optimizer"] == ["exact", ""]
    assert found["needed_bytes"] == 3 * found["checkpoint_bytes"] > 0
    assert found["blocked_seconds"] > 0


def test_a_command_that_fails_is_an_error(doctor: Doctor) -> None:
    status, text = doctor(SCRIPT.replace("HOLDER", EXACT), argument="fails")
    assert status == 2
    assert "ended with exit status 1 before step 3" in text


@pytest.mark.remedy("Add these lines to its loop:")
def test_a_loop_that_saves_nothing_gets_its_lines(doctor: Doctor) -> None:
    status, text = doctor(TRAINED_ELSEWHERE)
    assert status == 2
    assert "saved nothing" in text
    assert "ckpt = Checkpointer('runs/a', model=model, optimizer=optimizer)" in text
