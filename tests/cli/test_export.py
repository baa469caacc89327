"""``resumekit export``: one file by name that stock readers open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from resumekit.adapters.torch import Checkpointer
from resumekit.cli import main


def saved(directory: Path, model: Any) -> None:
    no_optimizer: Any = None
    with Checkpointer(directory, model=model, optimizer=no_optimizer) as checkpointer:
        checkpointer.save()


def export(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["export", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_every_name_has_the_bits_of_the_model_in_fp32(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, dtype=torch.bfloat16))
    model.append(nn.Linear(3, 3))
    model[3].weight = model[0].weight
    saved(tmp_path / "run", model)
    file = tmp_path / "model.safetensors"
    assert export(tmp_path / "run", file) == 0
    found = load_file(file)
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        expected = value.float() if value.dtype == torch.bfloat16 else value
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]


@pytest.mark.parametrize(
    ("dtype", "of_fp32", "of_bf16"),
    [
        ("bf16", torch.bfloat16, torch.bfloat16),
        ("fp16", torch.float16, torch.float16),
        ("as-trained", torch.float32, torch.bfloat16),
    ],
)
def test_another_type_is_what_torch_rounds_to(
    tmp_path: Path, dtype: str, of_fp32: torch.dtype, of_bf16: torch.dtype
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3, dtype=torch.bfloat16))
    saved(tmp_path / "run", model)
    file = tmp_path / "model.safetensors"
    assert export(tmp_path / "run", file, "--dtype", dtype) == 0
    found = load_file(file)
    kinds = {torch.float32: of_fp32, torch.bfloat16: of_bf16, torch.int64: torch.int64}
    for name, value in model.state_dict().items():
        assert found[name].dtype == kinds[value.dtype]
        assert torch.equal(found[name], value.to(kinds[value.dtype]))


def test_a_type_that_is_unknown_or_too_small_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.bias, 1e6)
    saved(tmp_path / "run", model)
    assert export(tmp_path / "run", tmp_path / "new", "--dtype", "int8") == 2
    assert "dtype: 'int8', expected one of fp32, bf16, fp16" in capsys.readouterr().err
    assert export(tmp_path / "run", tmp_path / "new", "--dtype", "fp16") == 2
    assert "bias: values too large for torch.float16" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_one_step_and_one_of_several_models_can_be_chosen(tmp_path: Path) -> None:
    models = {"first": nn.Linear(1, 1), "second": nn.Linear(2, 2)}
    saved(tmp_path / "run", models)
    (step,) = (tmp_path / "run").glob("step-*")
    file = tmp_path / "second.safetensors"
    assert export(step, file, "--component", "model/second") == 0
    assert torch.equal(load_file(file)["weight"], models["second"].weight)


def test_what_cannot_be_written_is_an_error_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run", {"first": nn.Linear(1, 1), "second": nn.Linear(2, 2)})
    assert export(tmp_path / "run", tmp_path / "new") == 2
    assert "no model to export (it has model/first, model/second)" in capsys.readouterr().err
    (tmp_path / "old").write_text("kept")
    assert export(tmp_path / "run", tmp_path / "old", "--component", "model/first") == 2
    assert "it exists" in capsys.readouterr().err
    assert export(tmp_path / "run", tmp_path / "no" / "folder", "--component", "model/first") == 2
    assert (tmp_path / "old").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old", "run"]


def test_damage_is_reported_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "run", nn.Linear(3, 3))
    (path,) = (tmp_path / "run").glob("step-*/model/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert export(tmp_path / "run", tmp_path / "new") == 2
    assert "rank-00000.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("make", [True, False], ids=["empty", "not there"])
def test_a_directory_without_a_checkpoint_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: bool
) -> None:
    if make:
        (tmp_path / "run").mkdir()
    assert export(tmp_path / "run", tmp_path / "new") == 2
    assert str(tmp_path / "run") in capsys.readouterr().err.replace("\n", "")
