"""A save, a resume and a verify show how far they are; their files are small and the clock fast."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.cli import main
from resumekit.log import logger, show_messages
from resumekit.progress_display import human_bytes
from resumekit.storage.store import Store


class Clock:
    """Each time that it is read, some seconds have passed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds = 0.0

    def monotonic(self) -> float:
        self.now += self.seconds
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr("resumekit.progress_display.time", clock)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", logger.propagate)
    level = logger.level
    logger.setLevel(logging.NOTSET)
    show_messages()
    yield clock
    logger.setLevel(level)


def train(directory: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(1010, 1010)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    checkpointer = Checkpointer(directory, model=model, optimizer=optimizer, save_every=2)
    loader = DataLoader(TensorDataset(torch.ones(2, 1010)))
    with checkpointer:
        for (batch,) in checkpointer.batches(loader, epochs=1):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step()


def lines(capfd: pytest.CaptureFixture[str], what: str) -> list[str]:
    start = f"resumekit: {what}: "
    return [
        line.removeprefix(start)
        for line in capfd.readouterr().err.splitlines()
        if line.startswith(start)
    ]


def size(directory: Path, name: str) -> str:
    (step,) = [step for step in Store(directory).step_names() if str(step) == name]
    files = Store(directory).open_step(step).manifest.files
    return human_bytes(sum(entry.size for entry in files))


def test_a_long_save_and_a_long_resume_are_reported(
    tmp_path: Path, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    clock.seconds = 4.0
    train(tmp_path)
    saving = lines(capfd, "saving step-00000002")
    whole = size(tmp_path, "step-00000002")
    assert any(f" of {whole}" in line for line in saving)
    assert saving[-1].startswith(f"{whole} in ")
    train(tmp_path)
    reading = lines(capfd, f"reading {tmp_path}/step-00000002")
    assert any(f" of {whole}" in line for line in reading)
    assert reading[-1].startswith(f"{whole} in ")


def test_what_is_quick_is_not_reported(
    tmp_path: Path, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path)
    train(tmp_path)
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path)])
    err = capfd.readouterr().err
    assert not any(f"resumekit: {word}" in err for word in ("saving", "reading", "verifying"))


def test_a_long_verify_is_reported_on_standard_error_and_its_result_is_not(
    tmp_path: Path, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path)
    clock.seconds = 4.0
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path)])
    assert ended.value.code == 0
    out, err = capfd.readouterr()
    whole = size(tmp_path, "step-00000002")
    start = f"resumekit: verifying {tmp_path}/step-00000002: "
    found = [line.removeprefix(start) for line in err.splitlines() if line.startswith(start)]
    assert len(found) >= 2
    assert f" of {whole}, about " in found[0]
    assert found[-1].startswith(f"{whole} in ")
    assert out.startswith("step-00000002  ok  ")
    assert "verifying" not in out


def test_a_damaged_checkpoint_has_no_line_that_it_was_verified(
    tmp_path: Path, clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path)
    (data,) = tmp_path.glob("step-00000002/state/*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    clock.seconds = 20.0
    with pytest.raises(SystemExit) as ended:
        main(["verify", str(tmp_path)])
    assert ended.value.code == 1
    found = lines(capfd, f"verifying {tmp_path}/step-00000002")
    assert found
    assert not any(" in " in line for line in found)
