"""``resumekit diff``: verdict, exit codes, JSON, and what is cut."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from resumekit.adapters.torch import Checkpointer
from resumekit.cli import main


def diff(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["diff", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def train(directory: Path, name: str, bias: float, **values: float) -> None:
    """Two steps; the second one sets the bias and adds a name."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    extras: dict[str, Any] = {"seen": 0, **values}
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(2)))
    with Checkpointer(
        directory, model=model, optimizer=optimizer, extras=extras, save_every=1
    ) as checkpointer:
        for batch in checkpointer.batches(loader, epochs=1):
            extras["seen"] += 1
            if batch[0].item() == 1:
                torch.nn.init.constant_(model.bias, bias)
                extras[name] = 1
            checkpointer.step()


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs with two checkpoints each; the second ones differ in a weight and in a name."""
    train(tmp_path / "a", "a", 0.0)
    train(tmp_path / "b", "b", 0.5)
    return tmp_path / "a", tmp_path / "b"


def test_the_newest_checkpoints_of_runs_that_differ(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(*runs) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("DIFFERENT: model, extras (")
    assert lines[1].split()[:2] == ["A", str(runs[0] / "step-00000002")]
    (bias,) = [line for line in lines if line.startswith("bias ")]
    assert bias.split() == ["bias", "float32", "[2]", "2", "0.5", "1", "1056964608"]
    assert any(line.startswith("only in A: values.a") for line in lines)


def test_equal_ones_by_step_and_by_path(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(*runs, "--step", "1") == 0
    assert capsys.readouterr().out.startswith("EQUAL: ")
    assert diff(*(run / "step-00000001" for run in runs)) == 0
    assert diff(runs[0] / "step-00000001", runs[0]) == 1


def test_times_are_named_apart_and_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time() + 0.125
    runs = [tmp_path / name for name in "ab"]
    for run, began, limit in zip(runs, (now - 5000.5, now - 40.25), (1.5, 1.5), strict=True):
        train(run, "limit", 0.0, began=began, limit=limit)
    assert diff(*runs) == 0
    out = capsys.readouterr().out
    assert "; not compared: 1 time" in out.splitlines()[0]
    assert "times of extras, not compared: values.began" in out
    diff(*runs, "--json")
    found = {each["key"]: each for each in json.loads(capsys.readouterr().out)["components"]}
    assert found["extras"]["from_clock"] == ["values.began"]


@pytest.mark.parametrize("values", [(1.5, 2.5), (1.2e9 + 0.5, 1.3e9 + 0.5), (None, 0.5)])
def test_values_that_are_no_times_count(
    tmp_path: Path, values: tuple[float | None, float | None]
) -> None:
    runs = [tmp_path / name for name in "ab"]
    now = time.time()
    for run, value in zip(runs, values, strict=True):
        train(run, "limit", 0.0, value=now - 0.125 if value is None else value)
    assert diff(*runs) == 1


def test_one_component(runs: tuple[Path, Path]) -> None:
    assert diff(*runs, "--component", "optimizer") == 0
    assert diff(*runs, "--component", "optimizer", "--component", "model") == 1


def test_json_is_read_back_by_a_program(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert diff(*runs, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["is_equal"] is False
    (model,) = [each for each in found["components"] if each["key"] == "model"]
    (bias,) = model["tensors"]
    assert (bias["name"], bias["elements"]["max_absolute"]) == ("bias", 0.5)


def test_the_page_shows_what_differs_and_what_one_side_has(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "diff.html"
    assert diff(*runs, "--html", page) == 1
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    text = page.read_text()
    assert '<div class="verdict bad"><strong>DIFFERENT: model, extras (' in text
    assert "In model, bias differs most, by 0.5." in text
    assert '<th scope="row" class="code">bias</th><td class="">float32</td>' in text
    assert "<title>100 %</title>" in text
    assert "Names that only A has." in text
    assert '<th scope="row" class="code">values.a</th>' in text
    assert diff(*runs, "--step", "1", "--html", page) == 0
    assert '<div class="verdict good"><strong>EQUAL: ' in page.read_text()


def test_with_json_the_path_of_the_page_is_not_in_the_output(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "diff.html"
    assert diff(*runs, "--json", "--html", page) == 1
    found = capsys.readouterr()
    assert json.loads(found.out)["is_equal"] is False
    assert found.err == f"{page}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("{a}", "{a}/nothing"),
        ("{a}", "{b}", "--step", "7"),
        ("{a}", "{b}", "--component", "ema"),
        ("{a}", "{b}", "--unknown"),
        ("{a}", "{b}", "--html", "{b}/diff.html"),
        ("{a}", "{b}", "--html", "{b}/../nowhere/diff.html"),
        ("{a}",),
    ],
)
def test_what_cannot_be_compared_is_an_error(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    assert diff(*(each.format(a=runs[0], b=runs[1]) for each in arguments)) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_damage_is_an_error(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = runs[1] / "step-00000002" / "model" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert diff(*runs) == 2
    assert "rank-00000.safetensors" in capsys.readouterr().err


def test_long_lists_are_cut_with_a_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_optimizer: Any = None
    for run in range(2):
        model = torch.nn.ParameterList([torch.full((1,), float(run))] * 30)
        with Checkpointer(tmp_path / str(run), model=model, optimizer=no_optimizer) as checkpointer:
            checkpointer.save()
    arguments = (tmp_path / "0", tmp_path / "1", "--component", "model")
    assert diff(*arguments) == 1
    assert "... and 10 more tensors; --all shows them" in capsys.readouterr().out
    assert diff(*arguments, "--all") == 1
    assert "more" not in capsys.readouterr().out
