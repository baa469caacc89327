"""Frozen tensors have a file of their own, which consecutive checkpoints do not write again."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.cli.views import list_directory
from resumekit.export import export_model
from resumekit.storage.directories import StepName
from resumekit.storage.io.file_system import LocalFileSystem
from resumekit.storage.manifest import StepReader

FILE = "model/rank-00000.frozen.safetensors"
SIZE = 1100  # so that the frozen parameters take up more than 4 MiB


def model_of(*, frozen: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, SIZE), nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 2))
    model[:2].requires_grad_(not frozen)
    return model


def train(
    directory: Path,
    num_steps: int,
    *,
    model: nn.Module | None = None,
    before_step: Callable[[int, nn.Module], None] = lambda step, model: None,
    **options: Any,
) -> nn.Module:
    model = model_of() if model is None else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = TensorDataset(torch.arange(36.0).reshape(12, 3) / 36, torch.arange(12) % 2)
    options = {"save_every": 1, "keep_latest": None, **options}
    with Checkpointer(directory, model=model, optimizer=optimizer, **options) as ckpt:
        for inputs, labels in ckpt.batches(DataLoader(data, shuffle=True), epochs=1):
            before_step(ckpt.progress.step + 1, model)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.step(loss=loss)
            if ckpt.progress.step == num_steps:
                break
    return model


def copies(directory: Path) -> list[int]:
    """The number of the copy that each checkpoint has, oldest first; copies count from 0."""
    numbers: dict[int, int] = {}
    inodes = [path.stat().st_ino for path in sorted(directory.glob(f"step-*/{FILE}"))]
    return [numbers.setdefault(inode, len(numbers)) for inode in inodes]


def steps(directory: Path) -> list[StepName]:
    names = [StepName.parse(path.name) for path in sorted(directory.glob("step-*"))]
    return [name for name in names if name is not None]


@pytest.mark.parametrize("async_save", [False, True])
def test_two_copies_are_written_and_linked_in_turn(async_save: bool, tmp_path: Path) -> None:
    train(tmp_path, 5, async_save=async_save)
    assert copies(tmp_path)[:5] == [0, 1, 0, 1, 0]


def test_stock_tools_read_both_files(tmp_path: Path) -> None:
    model = train(tmp_path, 2)
    step = sorted(tmp_path.glob("step-*"))[-1]
    frozen = load_file(step / FILE)
    rest = load_file(step / FILE.replace(".frozen", ""))
    assert sorted(frozen) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert sorted(rest) == ["2.bias", "2.weight"]
    for name, value in model.state_dict().items():
        assert torch.equal({**frozen, **rest}[name], value)


def test_every_checkpoint_verifies_and_is_resumed(tmp_path: Path) -> None:
    train(tmp_path, 4)
    for name in steps(tmp_path):
        StepReader(LocalFileSystem(), tmp_path, name).verify()
    other = model_of()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    train(tmp_path, 4, model=other)
    for key, value in model_of().state_dict().items():
        assert torch.equal(other.state_dict()[key], value) == (not key.startswith("2"))


@pytest.mark.parametrize("async_save", [False, True])
def test_changed_tensors_are_written_again(async_save: bool, tmp_path: Path) -> None:
    def change(step: int, model: Any) -> None:
        if step == 5:
            with torch.no_grad():
                model[1].weight[7, 8] += 1

    train(tmp_path, 8, before_step=change, async_save=async_save)
    assert copies(tmp_path)[:8] == [0, 1, 0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize("keep_every", [None, 2])
def test_no_copy_is_shared_where_one_checkpoint_is_kept(
    keep_every: int | None, tmp_path: Path
) -> None:
    seen: list[int] = []

    def note(step: int, model: Any) -> None:
        seen.extend(path.stat().st_nlink for path in tmp_path.glob(f"step-*/{FILE}"))

    train(tmp_path, 5, keep_latest=1, keep_every=keep_every, before_step=note)
    assert set(seen) == {1}


def test_two_copies_stay_among_the_kept_checkpoints(tmp_path: Path) -> None:
    seen = []

    def note(step: int, model: Any) -> None:
        if step > 2:
            seen.append(len(set(copies(tmp_path))))

    train(tmp_path, 8, keep_latest=2, before_step=note)
    assert set(seen) == {2}


def test_an_earlier_launch_is_never_linked_to(tmp_path: Path) -> None:
    train(tmp_path, 3)
    num_before = len(copies(tmp_path))
    train(tmp_path, 6)
    found = copies(tmp_path)
    assert not set(found[:num_before]) & set(found[num_before:])


def test_without_links_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):

        def refuse(self: Any, source: Path, target: Path, number: int = number) -> None:
            raise OSError(number, "no links")

        monkeypatch.setattr(LocalFileSystem, "link", refuse)
        directory = tmp_path / str(number)
        train(directory, 4)
        assert copies(directory)[:4] == [0, 1, 2, 3]
        for name in steps(directory):
            StepReader(LocalFileSystem(), directory, name).verify()


def test_a_damaged_copy_is_survived_by_the_other(tmp_path: Path) -> None:
    train(tmp_path, 4)
    newest, before = steps(tmp_path)[-1], steps(tmp_path)[-2]
    path = tmp_path / str(newest) / FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    with path.open("r+b") as file:  # the inode, which other checkpoints share
        file.write(content)
    resumed = []
    train(tmp_path, 5, before_step=lambda step, model: resumed.append(step))
    assert resumed[:1] == [before.step + 1]
    assert (tmp_path / "quarantine").is_dir()


def test_a_model_without_frozen_tensors_has_one_file(tmp_path: Path) -> None:
    train(tmp_path, 1, model=model_of(frozen=False))
    assert not list(tmp_path.glob("step-*/model/*frozen*"))
    step = steps(tmp_path)[0]
    index = json.loads((tmp_path / str(step) / "model/rank-00000.json").read_text())
    assert len(index["tensors"]) == 6


def test_few_frozen_tensors_stay_in_the_first_file(tmp_path: Path) -> None:
    model = model_of(frozen=False)
    model[0].requires_grad_(False)
    train(tmp_path, 1, model=model)
    assert not list(tmp_path.glob("step-*/model/*frozen*"))


def test_a_model_that_is_all_frozen_is_resumed(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model_of()
            self.inner.requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.scale * self.inner(inputs)

    train(tmp_path, 3, model=Scaled())
    assert copies(tmp_path)[:3] == [0, 1, 0]
    train(tmp_path, 5, model=Scaled())


def test_shared_bytes_are_listed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 4)
    list_directory(tmp_path, as_json=True)
    rows = json.loads(capsys.readouterr().out)
    size = (tmp_path / str(steps(tmp_path)[0]) / FILE).stat().st_size
    assert [row.get("shared_bytes", 0) for row in rows][-4:] == [size, size, 0, 0]
    list_directory(tmp_path, as_json=False)
    found = capsys.readouterr().out.splitlines()
    assert "KB" in found[1]
    assert "MB" in found[-1]


def test_an_export_holds_the_frozen_tensors(tmp_path: Path) -> None:
    model = train(tmp_path / "run", 2)
    step = StepReader(LocalFileSystem(), tmp_path / "run", steps(tmp_path / "run")[-1])
    export_model(step, tmp_path / "model.safetensors", dtype="fp32")
    exported = load_file(tmp_path / "model.safetensors")
    assert {name: value.tolist() for name, value in exported.items()} == {
        name: value.tolist() for name, value in model.state_dict().items()
    }
